"""exit_confidence_cosine: zero vectors, extreme magnitudes, NaN, strided rows."""

from __future__ import annotations

import pytest
import torch
from test_accept_mask import assert_accepts, measured, random_rows
from torch import Tensor

from cases import BATCH_SIZES, DTYPES, HIDDEN_SIZES, TOLERANCES
from eecore import ops
from random_calls import Checked, Maker


def exit_confidence_cosine(previous: Tensor, hidden: Tensor) -> Tensor:
    """Cosine per row in float64, 0 for a zero vector; see eecore.ops.exit_confidence_cosine."""
    previous, hidden = previous.double(), hidden.double()
    norms = previous.norm(dim=-1) * hidden.norm(dim=-1)
    cosine = (previous * hidden).sum(dim=-1) / norms
    return torch.where(norms == 0, 0.0, cosine).float()


def random_states(
    num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """States of two layers: the second is the first plus an update."""
    generator = torch.Generator().manual_seed(num_seqs * 10007 + hidden_size)
    previous = torch.randn(num_seqs, hidden_size, generator=generator)
    update = torch.randn(num_seqs, hidden_size, generator=generator)
    size = torch.rand(num_seqs, 1, generator=generator) * 3
    return previous.to(device, dtype), (previous + size * update).to(device, dtype)


def assert_matches(previous: torch.Tensor, hidden: torch.Tensor) -> None:
    expected = exit_confidence_cosine(previous, hidden)
    tolerance = TOLERANCES[torch.float32]  # the result is float32 whatever the states are
    torch.testing.assert_close(
        ops.exit_confidence_cosine(previous, hidden),
        expected,
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_matches_the_reference(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    for num_seqs in BATCH_SIZES:
        assert_matches(*random_states(num_seqs, hidden_size, dtype, device))


def test_a_zero_vector_has_confidence_zero(device: torch.device) -> None:
    states = torch.randn(4, 70, device=device)
    states[1] = 0
    other = torch.randn(4, 70, device=device)
    other[2] = 0
    got = ops.exit_confidence_cosine(states, other)
    assert got[1] == 0
    assert got[2] == 0
    assert (got[[0, 3]] != 0).all()
    assert ops.exit_confidence_cosine(torch.zeros(2, 70), torch.zeros(2, 70)).tolist() == [0, 0]


def test_equal_and_opposite_vectors_give_exactly_one_and_minus_one(device: torch.device) -> None:
    states = random_states(64, 577, torch.float32, device)[0]
    assert (ops.exit_confidence_cosine(states, states) == 1).all()
    assert (ops.exit_confidence_cosine(states, -states) == -1).all()
    assert (ops.exit_confidence_cosine(states, 3 * states).abs() <= 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("previous_scale", [1e-38, 1e-20, 1.0, 1e18, 1e37])
@pytest.mark.parametrize("hidden_scale", [1e-30, 1e-10, 1e30])
def test_magnitude_does_not_matter(
    previous_scale: float, hidden_scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    previous, hidden = random_states(5, 97, torch.float32, device)
    assert_matches((previous * previous_scale).to(dtype), (hidden * hidden_scale).to(dtype))


def test_denormal_vectors_are_not_zero_vectors(device: torch.device) -> None:
    tiny = torch.full((1, 40), 1e-45, device=device)
    assert ops.exit_confidence_cosine(tiny, tiny).tolist() == [1.0]


def test_nan_and_infinity_give_nan_in_their_row_alone(device: torch.device) -> None:
    previous, hidden = random_states(5, 40, torch.float32, device)
    hidden[1, 39] = float("nan")
    previous[3, 0] = float("inf")
    got = ops.exit_confidence_cosine(previous, hidden)
    assert got.isnan().tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_strided(dtype: torch.dtype, device: torch.device) -> None:
    previous, hidden = random_states(6, 100, dtype, device)
    assert_matches(previous[::2, 3:90], hidden[1::2, 10:97])
    assert_matches(previous[:1].expand(6, 100), hidden)


def test_rows_and_threads_do_not_change_a_result(device: torch.device) -> None:
    previous, hidden = random_states(257, 1000, torch.float32, device)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ops.exit_confidence_cosine(previous, hidden)
        torch.set_num_threads(2)
        together = ops.exit_confidence_cosine(previous, hidden)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)
    one_by_one = [
        ops.exit_confidence_cosine(previous[i : i + 1], hidden[i : i + 1]) for i in range(9)
    ]
    assert torch.equal(torch.cat(one_by_one), together[:9])


@pytest.mark.parametrize("num_seqs", [0, 1, 3, 8, 9, 64])
def test_rows_may_be_accepted_at_once(num_seqs: int, device: torch.device) -> None:
    previous, hidden = random_states(num_seqs, 100, torch.float32, device)
    rows = random_rows(num_seqs, device)
    rows["confidence"] = ops.exit_confidence_cosine(previous, hidden)

    def measure_and_accept() -> ops.AcceptMask:
        accept = ops.AcceptRows(rows["thresholds"], 5, rows["status"], rows["exit_layer"])
        confidence, mask = ops.exit_confidence_cosine(previous, hidden, accept=accept)
        assert torch.equal(confidence, rows["confidence"])
        return mask

    assert_accepts(rows, measure_and_accept, layer=5)


def test_what_accepting_takes_comes_whole_and_in_shape() -> None:
    op = torch.ops.eecore.exit_confidence_cosine.default
    states = (torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4))
    with pytest.raises(RuntimeError, match=r"exit_confidence_cosine: status: .* got thresholds$"):
        op(*states, torch.zeros(4), 5)
    accept = ops.AcceptRows(
        torch.zeros(3), 5, torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int32)
    )
    with pytest.raises(RuntimeError, match=r"thresholds: expected float32 \[num_seqs=4\], got"):
        ops.exit_confidence_cosine(*states[:2], accept=accept)
    with pytest.raises(RuntimeError, match=r"exit_confidence_cosine: layer: .* got 0"):
        ops.exit_confidence_cosine(
            *states[:2], accept=accept._replace(thresholds=torch.zeros(4), layer=0)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, 8, dtype=torch.float64)}, r"hidden: expected float32, bfloat16"),
        ({"hidden": torch.zeros(4, 8, dtype=torch.float16)}, r"hidden: .* on the CPU, got float16"),
        ({"hidden": torch.zeros(8)}, r"hidden: expected .* got float32 \[8\]"),
        ({"previous": torch.zeros(4, 8).bfloat16()}, r"previous: expected float32 .* got bfloat16"),
        (
            {"previous": torch.zeros(3, 8)},
            r"previous: expected .*num_seqs=4.* got float32 \[3, 8\]",
        ),
        ({"previous": torch.zeros(4, 9)}, r"previous: expected .*hidden_size=8\], .*\[4, 9\]"),
        ({"previous": torch.zeros(8, 4).T}, r"previous: expected the last 1 .* contiguous"),
        ({"hidden": torch.zeros(4, 16)[:, ::2]}, r"hidden: expected the last 1 .* contiguous"),
    ],
)
def test_bad_input_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"previous": torch.zeros(4, 8), "hidden": torch.zeros(4, 8), **change}
    with pytest.raises(RuntimeError, match=f"exit_confidence_cosine: {message}"):
        ops.exit_confidence_cosine(**arguments)


@pytest.mark.parametrize(
    ("confidence", "message"),
    [
        (torch.zeros(4, dtype=torch.float64), r"confidence: expected float32 .* got float64"),
        (torch.zeros(3), r"confidence: expected float32 \[num_seqs=4\], got float32 \[3\]"),
    ],
)
def test_a_bad_output_is_named(confidence: torch.Tensor, message: str) -> None:
    op = torch.ops.eecore.exit_confidence_cosine.default
    with pytest.raises(RuntimeError, match=f"exit_confidence_cosine: {message}"):
        op(torch.zeros(4, 8), torch.zeros(4, 8), confidence)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype, device: torch.device) -> None:
    previous, hidden = random_states(3, 20, dtype, device)
    torch.library.opcheck(
        torch.ops.eecore.exit_confidence_cosine.default,
        (previous, hidden, torch.empty(3, device=device)),
    )


def test_opcheck_with_accepting(device: torch.device) -> None:
    rows = random_rows(3, device)
    mask = ops.accept_mask(layer=5, **rows)
    torch.library.opcheck(
        torch.ops.eecore.exit_confidence_cosine.default,
        (
            *random_states(3, 20, torch.float32, device),
            torch.empty(3, device=device),
            *(rows["thresholds"], 5, rows["status"], rows["exit_layer"]),
            *mask,
        ),
    )


def test_compiles_without_a_graph_break(device: torch.device) -> None:
    previous, hidden = random_states(3, 20, torch.float32, device)
    compiled = torch.compile(ops.exit_confidence_cosine, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(previous, hidden), ops.exit_confidence_cosine(previous, hidden))


def fuzzed_call(m: Maker) -> Checked:
    rows, size, dtype = m.size(9), m.size(300), m.dtype()
    given = {"previous": m.states(rows, size, dtype), "hidden": m.states(rows, size, dtype)}
    return measured(
        m,
        given,
        lambda before: exit_confidence_cosine(before["previous"], before["hidden"]),
    )
