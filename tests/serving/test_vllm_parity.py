"""The arithmetic of the serving comparison; vLLM itself is not needed."""

import pytest

from drafttrain.acceptance.tau import Round
from tests.serving.vllm_parity import Run, agree, compare, cut_rounds

BLOCK = 4


def _run(accepted: list[list[int]], outputs: list[list[int]]) -> Run:
    rounds = [
        cut_rounds(5, len(ids), counts, BLOCK - 1)
        for counts, ids in zip(accepted, outputs, strict=True)
    ]
    return Run(outputs, rounds, {})


def test_draft_tokens_behind_the_end_of_a_response_do_not_count() -> None:
    # 1 token from the prefill, 3 + 1 from the first round, and room for 2 of the 4 of the second.
    assert cut_rounds(5, 7, [3, 3], 3) == [Round(5, 3, 3, 4), Round(9, 3, 2, 2)]


def test_rounds_that_do_not_add_up_to_the_output_are_noticed() -> None:
    with pytest.raises(AssertionError, match="in no round"):
        cut_rounds(5, 9, [3, 1], 3)


def test_equal_runs_agree() -> None:
    outputs = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]
    run = _run([[3, 0], [1, 0]], outputs)
    result = compare(Run(outputs, [], {}), run, Run(outputs, [], {}), run, BLOCK)
    assert result["failures"] == []
    assert result["accepted_per_draft"] == [1.0, 1.0]
    assert result["per_position"][0] == [0.5, 0.25, 0.25]


def test_one_different_id_fails() -> None:
    outputs = [[1, 2, 3, 4, 5, 6]]
    run = _run([[3, 0]], outputs)
    other = Run([[1, 2, 3, 4, 5, 7]], run.rounds, {})
    result = compare(Run(outputs, [], {}), other, Run(outputs, [], {}), run, BLOCK)
    assert result["failures"] == ["vllm_dflash_equals_vllm_plain: only 0 of 1 prompts"]


def test_acceptance_that_differs_by_more_than_two_percent_fails() -> None:
    outputs = [list(range(1, 402))]
    always, never = _run([[3] * 100], outputs), _run([[3] * 90 + [0] * 40], outputs)
    plain = Run(outputs, [], {})
    failures = compare(plain, always, plain, never, BLOCK)["failures"]
    assert failures[0] == "accepted per draft: ours 2.0769, vLLM 3.0000"
    assert [f.split(":")[0] for f in failures[1:]] == ["position 1", "position 2", "position 3"]


@pytest.mark.parametrize(
    ("ours", "theirs", "drafts", "same"),
    [
        (0.500, 0.509, 1000, True),
        (0.500, 0.511, 1000, False),
        (0.010, 0.011, 1000, True),  # 10 and 11 accepted tokens: one draft apart
        (0.010, 0.013, 1000, False),
    ],
)
def test_small_rates_may_differ_by_one_draft(
    ours: float, theirs: float, drafts: int, same: bool
) -> None:
    assert agree(ours, theirs, drafts) is same
