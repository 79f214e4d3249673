"""Laws L1 to L3 and L5 to L7 of docs/design.md: the same bits, no tolerance.

A file for each family of models says on which, so that two processes can share the work.
"""

from serve.check.moments import MOMENTS


class LawTests:
    """What holds for every model."""

    def test_drafts_neighbours_slots_chunks_and_preemption_change_no_bit(self, run):
        assert [str(r.first_difference) for r in run.met if r.first_difference] == []
        of_drafts = {"L1", "L7"} if run.speculations else set()
        assert {r.law for r in run.met if r.status == "passed"} == {"L2", "L3", "L5"} | of_drafts

    def test_scores_of_generated_tokens_are_what_generation_returned(self, run):
        assert run.scored.first_difference is None
        assert run.scored.tokens > 120

    def test_schedules_did_what_they_are_for(self, run):
        happened, num_schedules = run.happened, len(run.schedules)
        sizes = run.setting.sizes
        assert num_schedules >= 7
        assert happened.pieces.issuperset(sizes.chunks)
        assert len(happened.pieces) > 2 * len(sizes.chunks)
        assert happened.num_shared > happened.num_steps / 2
        assert happened.num_poisoned > num_schedules
        assert happened.num_seals > 3 * num_schedules
        assert happened.num_forced > 5 * num_schedules
        assert happened.num_starved > num_schedules / 4
        assert happened.slots == {0, 1, 2, 3}
        assert max(len(case.prompt) for case in run.cases) > 256

    def test_poisoned_schedules_had_rows_of_nan_beside_others(self, run):
        for schedule, happened in zip(run.schedules, run.happenings, strict=True):
            # In a starved pool the poisoned request may have run alone.
            if schedule.is_poisoned and not schedule.is_starved:
                assert happened.num_poisoned, str(schedule)

    def test_requests_were_preempted_at_every_moment(self, run):
        if len(run.schedules) >= 21:
            missing = [set(cover.missing(run.setting.sizes.cuts)) for cover in run.covers]
            assert not set.intersection(*missing)
        assert {moment for cover in run.covers for _, moment in cover.met} == set(MOMENTS)

    def test_requests_ask_for_everything(self, run):
        """Every parameter has several values; each log-probability is asked for, or not."""
        for name in run.cases[0].params:
            if name not in ("max_new_tokens", "sampling_seed"):
                assert len({repr(case.params[name]) for case in run.cases}) > 1, name
        for name in ("logprob_start_len", "top_logprobs_num", "token_ids_logprob"):
            assert len({repr(case.wanted[name]) for case in run.cases}) > 1, name
        outputs = [golden.outcome.tokens for golden in run.golden]
        pairs = zip(outputs, run.cases, strict=True)
        stopped = {len(tokens) < case.params["max_new_tokens"] for tokens, case in pairs}
        assert stopped == {False, True}, "no request was ended by a stop token, or every one"
