"""The state of a run in one safetensors file: weights, optimizer, random numbers, steps done.

The file is complete or absent (:mod:`eecore.files.whole`). Nothing in it is pickled. Of several
processes the first one writes it, with the random states of all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eecore.errors import TrainingError
from eecore.files.json_fields import JsonFields, parse_json
from eecore.files.tensors import TensorFile, shown_name
from eecore.files.whole import replacing
from eecore.lab.training.processes import Processes, is_divided, whole
from eecore.lab.training.recipe import RunConfig, TrainingConfig
from eecore.values import shown

Config = TypeVar("Config", bound=RunConfig)

FORMAT = "eecore training state 3"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
OPTIMIZER_PARTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class RunState(Generic[Config]):
    """The progress of a run.

    Attributes:
        step: steps done; also the position in the data, whose order follows from the seed.
        tokens: tokens read.
        seconds: the time of these steps.
        data_digest: the training data's.
        config: the run's.
        processes: the number of processes that compute it.
    """

    step: int
    tokens: int
    seconds: float
    data_digest: str
    config: Config
    processes: int = 1


def save_state(
    path: Path, state: RunState[Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write the state, replacing the previous one; every process of the run has to call this."""
    processes = Processes.current()
    tensors: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        tensor = whole(value.detach())
        if processes.is_first:
            tensors[name] = tensor.cpu() if is_divided(value) else tensor

    for name, parameter in _trained(model):
        keep(f"parameter.{name}", parameter)
        for part, value in optimizer.state.get(parameter, {}).items():
            keep(_part(part, name), value)
    for name, numbers in _random_states(torch.cuda.is_available()).items():
        for rank, own in enumerate(processes.gathered(numbers)):
            tensors[_of_process(name, rank)] = own
    if not processes.is_first:
        return
    about = {**asdict(state), "config": state.config.to_dict()}
    with replacing(path) as partial:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            partial,
            {"format": FORMAT, "state": json.dumps(about)},
        )


def read_state(path: Path, kind: type[Config] = TrainingConfig) -> RunState[Config]:  # type: ignore[assignment]
    """The progress in a state file; its tensors are not read."""
    with _opened(path) as file:
        metadata = file.metadata
    if metadata.get("format") != FORMAT or "state" not in metadata:
        raise TrainingError(
            f"{path}: expected the state of a run, {FORMAT!r}, got {shown(metadata.get('format'))}"
        )
    about = parse_json(metadata["state"], str(path), TrainingError)
    fields = JsonFields.of(about, str(path), TrainingError)
    fields.only("step", "tokens", "seconds", "data_digest", "config", "processes")
    try:
        config = kind.from_dict(about["config"])
    except TrainingError as error:
        raise TrainingError(f"{path}: config: {error}") from None
    return RunState(
        step=fields.integer("step", 0, config.steps),
        tokens=fields.integer("tokens", 0),
        seconds=fields.number("seconds", 0.0),
        data_digest=fields.text("data_digest"),
        config=config,
        processes=fields.integer("processes", 1),
    )


def state_to_resume(path: Path, config: Config, data_digest: str) -> RunState[Config]:
    """The state of a run with these settings, this data and this number of processes.

    Raises:
        TrainingError: the file's run has others.
    """
    saved = read_state(path, type(config))
    difference = saved.config.difference(config)
    if difference is not None:
        raise TrainingError(f"{path}: expected the settings that the run began with: {difference}")
    if saved.data_digest != data_digest:
        raise TrainingError(f"{path}: expected the data that the run began with, got other data")
    size = Processes.current().size
    if saved.processes != size:
        raise TrainingError(
            f"{path}: processes: expected {saved.processes}, as the run began with, got {size} "
            f"(torchrun --nproc-per-node {saved.processes})"
        )
    return saved


def load_state(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights, optimizer and random states as saved after ``step`` steps.

    Raises:
        TrainingError: a tensor is missing, unknown, or does not fit this model; nothing has changed
            then.
    """
    trained, rank = dict(_trained(model)), Processes.current().rank
    device = next(model.parameters()).device
    random = _random_states(device.type == "cuda")
    with _opened(path) as file:
        _check(file, trained, random, Processes.current().size)
        states = {
            name: {
                part: _like(parameter, file.tensor(_part(part, name)))
                for part in OPTIMIZER_PARTS
                if _part(part, name) in file.names
            }
            for name, parameter in trained.items()
        }
        _check_steps(file, states, step)
        random = {name: file.tensor(_of_process(name, rank)) for name in random}
        try:
            torch.Generator().set_state(random["random.cpu"])
        except RuntimeError as error:
            got = str(error).splitlines()[0]
            raise file.wrong("random.cpu", "the state of a generator", got) from None
        for name, parameter in trained.items():
            parameter.data.copy_(_like(parameter, file.tensor(f"parameter.{name}")))
            optimizer.state[parameter] = states[name]
    torch.set_rng_state(random["random.cpu"])
    if "random.cuda" in random:
        torch.cuda.set_rng_state(random["random.cuda"], device)


def _random_states(has_gpu: bool) -> dict[str, Tensor]:
    """The states of this process's generators, by name."""
    states = {"random.cpu": torch.get_rng_state()}
    return {**states, "random.cuda": torch.cuda.get_rng_state()} if has_gpu else states


def _of_process(name: str, rank: int) -> str:
    """The name in the file of a generator of a process."""
    return f"{name}.{rank}" if rank else name


def _like(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """A tensor divided among processes as a parameter is; scalars are not."""
    moved = tensor.to(parameter.device)
    if not is_divided(parameter) or not tensor.ndim:
        return moved
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _opened(path: Path) -> TensorFile:
    return TensorFile(path, TrainingError, what="the state of a run")


def _check(
    file: TensorFile,
    trained: Mapping[str, nn.Parameter],
    random: Mapping[str, Tensor],
    processes: int,
) -> None:
    """Check for the weights of this model, each with all of AdamW's tensors or none, and nothing
    else.
    """
    wanted = {f"parameter.{name}" for name in trained}
    held = {name for name in file.names if name.startswith("parameter.")}
    if wanted != held:
        stranger = min(wanted ^ held).removeprefix("parameter.")
        raise TrainingError(
            f"{file.path}: expected the trained weights of this model, got others: "
            f"{shown_name(stranger)} is in only one of them"
        )
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, parameter in trained.items():
        there = [part for part in OPTIMIZER_PARTS if _part(part, name) in file.names]
        if there and len(there) < len(OPTIMIZER_PARTS):
            raise TrainingError(
                f"{file.path}: optimizer of {name}: expected {', '.join(OPTIMIZER_PARTS)}, got "
                f"{', '.join(there)}"
            )
        like = DTYPES.get(parameter.dtype, "none"), tuple(parameter.shape)
        expected[f"parameter.{name}"] = like
        expected |= {_part(part, name): ("F32", ()) if part == "step" else like for part in there}
    generators = {
        _of_process(f"random.{on}", r) for on in ("cpu", "cuda") for r in range(processes)
    }
    strangers = file.names - expected.keys() - generators
    if strangers:
        raise file.wrong(min(strangers), "no such tensor in the state of this run", "one")
    for name, numbers in random.items():
        for own in (_of_process(name, rank) for rank in range(processes)):
            if own not in file.names:
                raise file.wrong(own, "the state of the random numbers", "none")
            expected[own] = "U8", tuple(numbers.shape)
    for name, (dtype, shape) in expected.items():
        got = file.stored_dtype(name), file.shape(name)
        if got != (dtype, shape):
            raise file.wrong(name, f"{dtype} {list(shape)}", f"{got[0]} {shown(list(got[1]))}")


def _check_steps(file: TensorFile, states: Mapping[str, dict[str, Tensor]], step: int) -> None:
    """Check that some weights have had a gradient in every step of the run, and none in more."""
    done = {name: float(state["step"]) for name, state in states.items() if state}
    for name, count in done.items():
        if not (1 <= count <= step and count.is_integer()):
            raise file.wrong(_part("step", name), f"1..{step}, the run's steps", f"{count:g}")
    most = max(done.values(), default=0.0)
    if most != step:
        raise TrainingError(
            f"{file.path}: expected an optimizer that has done the run's {step} steps, got one "
            f"that has done {most:g}"
        )


def _part(part: str, name: str) -> str:
    """The name in the file of a part of a parameter's optimizer state."""
    return f"optimizer.{part}.{name}"


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
