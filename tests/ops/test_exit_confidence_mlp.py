"""exit_confidence_mlp: linear and ReLU classifiers, with and without biases."""

from __future__ import annotations

import pytest
import torch
from test_accept_mask import assert_accepts, measured, random_rows
from torch import Tensor

from cases import BATCH_SIZES, CLASSIFIER_INNER_SIZES, DTYPES, HIDDEN_SIZES, TOLERANCES
from eecore import ops
from random_calls import Checked, Maker


def exit_confidence_mlp(
    hidden: Tensor,
    weight1: Tensor,
    bias1: Tensor | None = None,
    weight2: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """Probability of class 1 in float64; see eecore.ops.exit_confidence_mlp."""
    out = hidden.double() @ weight1.double().T
    if bias1 is not None:
        out = out + bias1.double()
    if weight2 is not None:
        out = out.relu() @ weight2.double().T
        if bias2 is not None:
            out = out + bias2.double()
    return out.softmax(dim=-1)[:, 1].float()


def random_classifier(
    hidden_size: int, inner_size: int | None, device: torch.device, bias: bool = True
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(hidden_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    rows = inner_size or 2
    weights = {"weight1": normal(rows, hidden_size) / hidden_size**0.5}
    if inner_size is not None:
        weights["weight2"] = 2 * normal(2, inner_size) / inner_size**0.5
    if bias:
        weights["bias1"] = normal(rows)
        if inner_size is not None:
            weights["bias2"] = normal(2)
    return weights


def random_states(
    num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    generator = torch.Generator().manual_seed(num_seqs)
    return torch.randn(num_seqs, hidden_size, generator=generator).to(device, dtype)


def assert_matches(hidden: Tensor, weights: dict[str, Tensor]) -> None:
    tolerance = TOLERANCES[torch.float32]  # float32 arithmetic and result for every dtype
    torch.testing.assert_close(
        ops.exit_confidence_mlp(hidden, **weights),
        exit_confidence_mlp(hidden, **weights),
        rtol=tolerance.rtol,
        atol=tolerance.atol,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("inner_size", CLASSIFIER_INNER_SIZES)
def test_matches_the_reference(
    inner_size: int | None, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    weights = random_classifier(hidden_size, inner_size, device)
    is_small = hidden_size < 1000 and (inner_size is None or inner_size < 64)
    for num_seqs in BATCH_SIZES if is_small else (0, 1, 9):
        assert_matches(random_states(num_seqs, hidden_size, dtype, device), weights)


@pytest.mark.parametrize("inner_size", [None, 12])
def test_biases_may_be_left_out(inner_size: int | None, device: torch.device) -> None:
    hidden = random_states(5, 50, torch.float32, device)
    full = random_classifier(50, inner_size, device)
    for absent in (("bias1",), ("bias2",), ("bias1", "bias2")):
        assert_matches(hidden, {name: w for name, w in full.items() if name not in absent})


def test_far_logits_give_zero_and_one(device: torch.device) -> None:
    hidden = torch.tensor([[1000.0], [-1000.0]], device=device)
    weight1 = torch.tensor([[-1.0], [1.0]], device=device)
    assert ops.exit_confidence_mlp(hidden, weight1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("inner_size", [None, 12])
def test_nan_stays_nan_in_its_row_alone(inner_size: int | None, device: torch.device) -> None:
    hidden = random_states(5, 50, torch.float32, device)
    hidden[3, 49] = float("nan")
    got = ops.exit_confidence_mlp(hidden, **random_classifier(50, inner_size, device))
    assert got.isnan().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_strided(dtype: torch.dtype, device: torch.device) -> None:
    hidden = random_states(9, 64, dtype, device)[::2, 5:55]
    assert_matches(hidden, random_classifier(50, 12, device))
    assert_matches(hidden[:1, :48].expand(9, 48), random_classifier(48, 12, device))


@pytest.mark.parametrize("inner_size", [None, 12])
def test_weights_may_start_anywhere(inner_size: int | None, device: torch.device) -> None:
    weights = random_classifier(64, inner_size, device)
    shifted = torch.empty(weights["weight1"].numel() + 1, device=device)[1:]
    shifted = shifted.view_as(weights["weight1"]).copy_(weights["weight1"])
    hidden = random_states(9, 64, torch.float32, device)
    assert_matches(hidden, {**weights, "weight1": shifted})


@pytest.mark.parametrize("inner_size", [None, 130])
def test_rows_and_threads_do_not_change_a_result(
    inner_size: int | None, device: torch.device
) -> None:
    hidden = random_states(257, 576, torch.float32, device)
    weights = random_classifier(576, inner_size, device)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ops.exit_confidence_mlp(hidden, **weights)
        torch.set_num_threads(2)
        together = ops.exit_confidence_mlp(hidden, **weights)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)
    one_by_one = [ops.exit_confidence_mlp(hidden[i : i + 1], **weights) for i in range(9)]
    assert torch.equal(torch.cat(one_by_one), together[:9])


@pytest.mark.parametrize("num_seqs", [0, 1, 3, 8, 9, 32, 33])
@pytest.mark.parametrize(("inner_size", "hidden_size"), [(None, 100), (12, 100), (24, 4096)])
def test_rows_may_be_accepted_at_once(
    inner_size: int | None, hidden_size: int, num_seqs: int, device: torch.device
) -> None:
    weights = random_classifier(hidden_size, inner_size, device)
    hidden = random_states(num_seqs, hidden_size, torch.float32, device)
    rows = random_rows(num_seqs, device)
    rows["confidence"] = ops.exit_confidence_mlp(hidden, **weights)

    def measure_and_accept() -> ops.AcceptMask:
        accept = ops.AcceptRows(rows["thresholds"], 5, rows["status"], rows["exit_layer"])
        confidence, mask = ops.exit_confidence_mlp(hidden, **weights, accept=accept)
        assert torch.equal(confidence, rows["confidence"])
        return mask

    assert_accepts(rows, measure_and_accept, layer=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, 8).double()}, r"hidden: expected float32, bfloat16"),
        ({"hidden": torch.zeros(4, 16)[:, ::2]}, r"hidden: expected the last 1 .* contiguous"),
        ({"weight1": torch.zeros(6, 8).bfloat16()}, r"weight1: expected float32 .* got bfloat16"),
        ({"weight1": torch.zeros(6, 9)}, r"weight1: expected .*hidden_size=8\], got .*\[6, 9\]"),
        ({"weight1": torch.zeros(8, 6).T}, r"weight1: expected the last 2 .* contiguous"),
        (
            {"weight1": torch.zeros(0, 8), "bias1": None, "weight2": torch.zeros(2, 0)},
            r"weight1: e.* >= 1",
        ),
        ({"bias1": torch.zeros(2)}, r"bias1: expected float32 \[inner_size=6\], got float32 \[2\]"),
        ({"weight2": torch.zeros(3, 6)}, r"weight2: expected float32 \[2, inner_size=6\], got"),
        (
            {"weight2": None, "bias2": None},
            r"weight1: expected inner_size=2 without weight2 .* got 6",
        ),
        (
            {"weight1": torch.zeros(2, 8), "bias1": None, "weight2": None},
            r"bias2: expected only together",
        ),
        ({"bias2": torch.zeros(3)}, r"bias2: expected float32 \[2\], got float32 \[3\]"),
    ],
)
def test_bad_input_is_named(change: dict[str, Tensor | None], message: str) -> None:
    arguments: dict[str, Tensor | None] = {
        "hidden": torch.zeros(4, 8),
        "weight1": torch.zeros(6, 8),
        "bias1": torch.zeros(6),
        "weight2": torch.zeros(2, 6),
        "bias2": torch.zeros(2),
        **change,
    }
    with pytest.raises(RuntimeError, match=f"exit_confidence_mlp: {message}"):
        ops.exit_confidence_mlp(**arguments)  # type: ignore[arg-type]


def test_a_bad_output_is_named() -> None:
    op = torch.ops.eecore.exit_confidence_mlp.default
    with pytest.raises(RuntimeError, match=r"exit_confidence_mlp: confidence: .*num_seqs=4.*\[3\]"):
        op(torch.zeros(4, 8), torch.zeros(2, 8), None, None, None, torch.zeros(3))


@pytest.mark.parametrize("inner_size", [None, 6])
def test_opcheck(inner_size: int | None, device: torch.device) -> None:
    weights = random_classifier(20, inner_size, device)
    torch.library.opcheck(
        torch.ops.eecore.exit_confidence_mlp.default,
        (
            random_states(3, 20, torch.bfloat16, device),
            *(weights.get(name) for name in ("weight1", "bias1", "weight2", "bias2")),
            torch.empty(3, device=device),
        ),
    )


def test_opcheck_with_accepting(device: torch.device) -> None:
    weights, rows = random_classifier(20, 6, device), random_rows(3, device)
    mask = ops.accept_mask(layer=5, **rows)
    torch.library.opcheck(
        torch.ops.eecore.exit_confidence_mlp.default,
        (
            random_states(3, 20, torch.float32, device),
            *(weights[name] for name in ("weight1", "bias1", "weight2", "bias2")),
            torch.empty(3, device=device),
            *(rows["thresholds"], 5, rows["status"], rows["exit_layer"]),
            *mask,
        ),
    )


def test_compiles_without_a_graph_break(device: torch.device) -> None:
    hidden, weights = random_states(3, 20, torch.float32, device), random_classifier(20, 6, device)
    compiled = torch.compile(ops.exit_confidence_mlp, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden, **weights), ops.exit_confidence_mlp(hidden, **weights))


def fuzzed_call(m: Maker) -> Checked:
    rows, size = m.size(40), m.size(100, 1)
    deep = m.chance()
    inner = m.size(90, 1) if deep else 2
    given = {
        "hidden": m.states(rows, size, m.dtype()),
        "weight1": m.placed(m.normal(inner, size) * size**-0.5),
        "bias1": m.maybe(lambda: m.placed(m.normal(inner))),
        "weight2": m.placed(m.normal(2, inner) * inner**-0.5) if deep else None,
        "bias2": m.maybe(lambda: m.placed(m.normal(2))) if deep else None,
    }
    names = tuple(given)
    return measured(m, given, lambda before: exit_confidence_mlp(*(before[n] for n in names)))
