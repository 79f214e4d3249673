"""What can go wrong with a request that was accepted."""


class StepError(RuntimeError):
    """A step failed and with it the request; the engine goes on. The cause is chained."""


class EngineDeadError(RuntimeError):
    """The engine is shut down, or its step thread has died; then the cause is chained."""
