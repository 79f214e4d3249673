"""The checker that the test run puts around every annotated function of the array packages."""

from beartype import BeartypeConf, beartype

# An int is a fine float, as it is for static checkers.
checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
