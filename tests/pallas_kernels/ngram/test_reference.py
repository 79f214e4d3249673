"""N-gram rows against the unbounded-integer oracle and the published constants.

The constants and the four row vectors belong to Qwen3.8-Flash-Next (vocabulary 248,320, seed
1234, two n-gram lengths of 8 heads, base 20,000,000, divisor 128, eos 248,044).
"""

import numpy as np
import pytest

from pallas_kernels.ngram.reference import ngram_rows
from tests.oracles import ngram as oracle

VOCAB, EOS = 248320, 248044

VECTORS = {
    "first token of a sequence": (
        [0],
        "768795 32189829 51641306 71063218 85886852 104959504 134316676 154856127 "
        "173280301 194832882 202840854 222492280 256138797 271010889 296240796 304432235",
    ),
    "three ordinary tokens": (
        [5, 6, 7],
        "9319853 32980418 54810932 61373850 95570932 100303321 137402047 146866965 "
        "160487518 192851935 200610520 228493582 254676383 260859079 296253588 313224935",
    ),
    "after the end of a document": (
        [5, EOS, 6],
        "5664792 36347845 45430210 62335259 80715773 107640718 138776280 155020188 "
        "170966476 196070473 201554940 239710055 255131875 271779393 290934383 308751519",
    ),
    "largest id": (
        [248319, 248319, 248319],
        "3035822 30922970 45995374 64361017 92705579 115727959 130487234 157254389 "
        "171350132 183732882 212505503 229174638 257427880 265877325 282070880 303365432",
    ),
}


@pytest.fixture(scope="module")
def flash_next_table():
    return oracle.constants(
        0, VOCAB, ngram_size=3, heads=8, base=20_000_000, divisor=128, seed=1234
    )


def test_oracle_constants(flash_next_table):
    assert flash_next_table.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert flash_next_table.moduli[:3] == (20000003, 20000023, 20000033)
    assert flash_next_table.moduli[-1] == 20000171
    assert flash_next_table.offsets[-1] == 300001275
    assert flash_next_table.num_rows == 320001536


@pytest.mark.parametrize("case", VECTORS)
def test_published_rows(flash_next_table, case):
    ids, expected = VECTORS[case]
    rows = ngram_rows(np.array(ids), flash_next_table, ngram_size=3, heads_per_ngram=8, eos=EOS)
    assert rows.dtype == np.int64
    assert rows[-1].tolist() == [int(row) for row in expected.split()]


@pytest.mark.parametrize(("ngram_size", "heads", "rank"), [(2, 4, 0), (3, 8, 1), (4, 3, 0)])
def test_random_ids_match_oracle(ngram_size, heads, rank):
    table = oracle.constants(
        rank, 320, ngram_size=ngram_size, heads=heads, base=53, divisor=128, seed=1234
    )
    ids = np.random.default_rng(rank).integers(0, 12, 300)
    rows = ngram_rows(ids, table, ngram_size=ngram_size, heads_per_ngram=heads, eos=7)
    expected = oracle.rows(ids.tolist(), table, ngram_size=ngram_size, heads=heads, eos=7)
    assert rows.tolist() == expected


def test_tokens_before_the_last_eos_do_not_matter():
    table = oracle.constants(0, 320, ngram_size=3, heads=2, base=53, divisor=8, seed=1234)
    first, second = (
        ngram_rows(np.array([*start, 7, 5, 6]), table, ngram_size=3, heads_per_ngram=2, eos=7)
        for start in ([1, 2], [3, 4])
    )
    np.testing.assert_array_equal(first[-2:], second[-2:])
    assert (first[2] != second[2]).any()
