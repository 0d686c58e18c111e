"""The arguments of ``fsdp-fx plan``, and the workload that they describe.

Options that are not given are None until here, so that one which has no effect on what is
planned can be refused.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from fsdp_fx.forecast.comparison import EVERYTHING, Budget, Prefetch, ReduceGradients, everything
from fsdp_fx.forecast.quantities import bandwidth, byte_count, nanoseconds
from fsdp_fx.forecast.shape import Decoder, Layers, Unit, stage_units, unit_specs
from fsdp_fx.forecast.workload import Collectives, Workload, of_schedule, of_trace
from fsdp_fx.planning.memory import format_bytes
from fsdp_fx.planning.pipelines import SCHEDULES, default_chunks, pipeline_calls, schedule_name
from fsdp_fx.saved import load_trace
from fsdp_fx.trace import Trace, UnitSpec

__all__ = ["ForecastError", "Options", "add_arguments", "options_of"]

_BANDWIDTH = 50e9
_LATENCY = 20_000
_BACKWARD = 2.0
_TOKENS = 4096
_TFLOPS = 400.0
_RANKS_PER_STAGE = 8
_MICROBATCHES_PER_RANK = 4
_FEWEST_MICROBATCHES = 8
_DTYPES = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn")
}
# Of one pipeline rank. More would take hours.
_MOST_EVENTS = 200_000
_MOST_LAYERS = 100_000
# Sums of bytes over a step must fit in 64 bits.
_MOST_BYTES = 2**62

# What describes a schedule and a model: a trace has both.
_SCHEDULED = (
    *("schedule", "pipeline", "virtual", "microbatches"),
    *("layers", "hidden", "feed_forward", "heads", "key_value_heads", "vocabulary"),
    *("unit_bytes", "parameter_dtype", "reduction_dtype"),
)

T = TypeVar("T")


class ForecastError(ValueError):
    """What is asked cannot be planned. The message says what to change, in one line."""


@dataclass(frozen=True)
class Options:
    """What ``fsdp-fx plan`` is asked.

    Args:
        workload: what to plan for.
        budgets: bytes that may stay resident beyond what an event needs.
        reduce_gradients: when the optimum reduces.
        prefetch: how far ahead gathers start.
        per_rank: whether to show every pipeline rank.
        json: file for the numbers.
        picture: file for the picture.
    """

    workload: Workload
    budgets: tuple[Budget, ...]
    reduce_gradients: ReduceGradients
    prefetch: Prefetch
    per_rank: bool
    json: Path | None
    picture: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``fsdp-fx plan``."""
    step = parser.add_argument_group("the step")
    known = ", ".join(name.removeprefix("Schedule") for name in SCHEDULES)
    step.add_argument(
        "--schedule",
        type=_checked(schedule_name),
        metavar="NAME",
        help=f"class of torch.distributed.pipelining: {known} (default: 1F1B; Interleaved1F1B "
        "with --virtual above 1)",
    )
    step.add_argument(
        "--ranks",
        type=_whole,
        metavar="N",
        help=f"GPUs in all (default: {_RANKS_PER_STAGE} for each pipeline rank); with --trace "
        "those that shard a unit",
    )
    step.add_argument("--pipeline", type=_whole, metavar="N", help="pipeline ranks (default: 1)")
    step.add_argument(
        "--virtual", type=_whole, metavar="N", help="stages on each pipeline rank (default: 1 or 2)"
    )
    step.add_argument(
        "--microbatches",
        type=_whole,
        metavar="N",
        help=f"microbatches of a step (default: {_MICROBATCHES_PER_RANK} for each pipeline rank, "
        f"at least {_FEWEST_MICROBATCHES})",
    )
    step.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="plan for a recorded trace (fsdp_fx.saved.save_trace) instead of a schedule",
    )

    model = parser.add_argument_group("the model: equal decoder layers, or layers by their bytes")
    model.add_argument("--layers", type=_whole, metavar="N", help="layers, each a unit")
    model.add_argument("--hidden", type=_whole, metavar="N", help="width between layers")
    model.add_argument(
        "--feed-forward",
        type=_whole,
        metavar="N",
        help="width of the gated feed-forward (default: 8/3 of --hidden, up to a multiple of 256)",
    )
    model.add_argument("--heads", type=_whole, metavar="N", help="attention heads")
    model.add_argument(
        "--key-value-heads", type=_whole, metavar="N", help="heads of keys and values"
    )
    model.add_argument(
        "--vocabulary", type=_whole, metavar="N", help="adds an embedding and a head"
    )
    model.add_argument(
        "--unit-bytes",
        type=_listed(_size),
        metavar="SIZE[,SIZE…]",
        help="bytes of each layer's full parameters, instead of the widths: one for --layers "
        "layers, or one for each",
    )
    dtypes = tuple(_DTYPES)
    model.add_argument(
        "--parameter-dtype", choices=dtypes, help="of gathered parameters (default: bfloat16)"
    )
    model.add_argument(
        "--reduction-dtype", choices=dtypes, help="of full gradients (default: float32)"
    )

    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--bandwidth",
        type=_checked(bandwidth),
        metavar="RATE",
        help="of each GPU, for gathers, reductions and between stages (default: 50GB/s)",
    )
    machine.add_argument(
        "--latency",
        type=_checked(nanoseconds),
        metavar="TIME",
        help="of each gather, reduction and transfer (default: 20us)",
    )
    machine.add_argument(
        "--compute",
        type=_checked(nanoseconds),
        metavar="TIME",
        help="forward of a layer for one microbatch, instead of --tokens and --tflops",
    )
    machine.add_argument(
        "--tokens",
        type=_whole,
        metavar="N",
        help=f"tokens of a microbatch on one GPU (default: {_TOKENS})",
    )
    machine.add_argument(
        "--tflops",
        type=_positive,
        metavar="X",
        help=f"10^12 operations a second that a GPU reaches (default: {_TFLOPS:g})",
    )
    machine.add_argument(
        "--backward",
        type=_positive,
        metavar="X",
        help=f"a backward in forwards (default: {_BACKWARD:g})",
    )

    plan = parser.add_argument_group("the plan")
    plan.add_argument(
        "--budget",
        type=_listed(_budget),
        metavar="SIZE[,SIZE…]",
        help="bytes of full parameters (and full gradients, if planned) that may stay on a GPU "
        "beyond what each event needs, or everything (default: 0, three in between, everything)",
    )
    plan.add_argument(
        "--reduce-gradients",
        choices=("per_backward", "per_window", "planned"),
        default="per_backward",
        help="when the optimum reduces (default: per_backward)",
    )
    plan.add_argument(
        "--prefetch",
        type=_prefetch,
        metavar="one|none|timed|N",
        help="how far ahead gathers start: one event, none, as durations need, or N elements "
        "(default: one)",
    )

    output = parser.add_argument_group("what to show")
    output.add_argument("--per-rank", action="store_true", help="a row for each pipeline rank")
    output.add_argument("--json", type=Path, metavar="FILE", help="save the numbers")
    output.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw step time against memory: .png or .svg"
    )


def options_of(parsed: argparse.Namespace) -> Options:
    """What the arguments ask.

    Raises:
        ForecastError: they contradict each other, or cannot be planned.
    """
    _check_outputs(parsed)
    workload = _scheduled(parsed) if parsed.trace is None else _traced(parsed)
    reduce_gradients: ReduceGradients = parsed.reduce_gradients
    return Options(
        workload=workload,
        budgets=_budgets(parsed.budget, workload, reduce_gradients),
        reduce_gradients=reduce_gradients,
        prefetch=None if parsed.prefetch == "one" else parsed.prefetch,
        per_rank=parsed.per_rank,
        json=parsed.json,
        picture=parsed.picture,
    )


# From the arguments to a workload.


def _scheduled(parsed: argparse.Namespace) -> Workload:
    pipeline = _given(parsed.pipeline, 1)
    ranks = _given(parsed.ranks, _RANKS_PER_STAGE * pipeline)
    chunks = parsed.virtual
    schedule = parsed.schedule
    if schedule is None:
        several = chunks is not None and chunks > 1
        schedule = "ScheduleInterleaved1F1B" if several else "Schedule1F1B"
    if chunks is None:
        chunks = default_chunks(schedule)
    microbatches = _given(
        parsed.microbatches, max(_FEWEST_MICROBATCHES, _MICROBATCHES_PER_RANK * pipeline)
    )
    if ranks % pipeline or ranks == pipeline:
        raise ForecastError(
            f"--ranks {ranks} over --pipeline {pipeline}: use 2 or more times as many, so that "
            "each stage is sharded over equally many"
        )
    if parsed.layers is not None and parsed.layers > _MOST_LAYERS:
        raise ForecastError(
            f"--layers {parsed.layers}: more than the {_MOST_LAYERS:,} that are planned"
        )
    stages = _stages(parsed, pipeline, chunks)
    events = 2 * microbatches * chunks * max(len(units) for units in stages)
    if events > _MOST_EVENTS:
        raise ForecastError(
            f"--microbatches {microbatches} make a step of {events:,} events on a rank, more than "
            f"the {_MOST_EVENTS:,} that are planned: use fewer, or fewer layers"
        )
    try:
        calls = pipeline_calls(schedule, pipeline, chunks, microbatches)
    except ValueError as error:
        raise ForecastError(str(error)) from error
    specs = unit_specs(
        stages,
        _DTYPES[_given(parsed.parameter_dtype, "bfloat16")],
        _DTYPES[_given(parsed.reduction_dtype, "float32")],
    )
    units = [unit for stage in stages for unit in stage]
    _require_plannable([spec for stage in specs for spec in stage], events, "the model")
    forwards = {
        spec.name: _forward(parsed, unit, units)
        for own, own_specs in zip(stages, specs, strict=True)
        for unit, spec in zip(own, own_specs, strict=True)
    }
    activations = 0
    if parsed.hidden is not None and parsed.compute is None:
        itemsize = _DTYPES[_given(parsed.parameter_dtype, "bfloat16")].itemsize
        activations = _given(parsed.tokens, _TOKENS) * parsed.hidden * itemsize
    return of_schedule(
        _title(schedule, ranks, pipeline, chunks, microbatches, units),
        calls,
        specs,
        forwards,
        _given(parsed.backward, _BACKWARD),
        _collectives(parsed, ranks // pipeline),
        activations,
    )


def _title(
    schedule: str, ranks: int, pipeline: int, chunks: int, microbatches: int, units: Sequence[Unit]
) -> str:
    layers = sum(unit.is_layer for unit in units)
    virtual = f" × {chunks} stages" if chunks > 1 else ""
    return (
        f"{schedule.removeprefix('Schedule')}, {ranks:,} GPUs: {pipeline} pipeline "
        f"{_noun(pipeline, 'rank')}{virtual}, sharded over {ranks // pipeline:,}; "
        f"{microbatches} {_noun(microbatches, 'microbatch', 'microbatches')}, {layers} "
        f"{_noun(layers, 'layer')}, {_parameters(sum(unit.elements for unit in units))}"
    )


def _parameters(elements: int) -> str:
    value, suffix = (elements / 1e9, "B") if elements >= 1e9 else (elements / 1e6, "M")
    return f"{value:.3g}{suffix} parameters"


def _noun(count: int, one: str, several: str | None = None) -> str:
    return one if count == 1 else several or f"{one}s"


def _stages(parsed: argparse.Namespace, pipeline: int, chunks: int) -> tuple[tuple[Unit, ...], ...]:
    units = _units_by_bytes(parsed) if parsed.unit_bytes is not None else _units_by_width(parsed)
    stages = pipeline * chunks
    layers = sum(unit.is_layer for unit in units)
    if layers % stages or layers < stages:
        raise ForecastError(
            f"{layers} layers over {stages} stages ({pipeline} pipeline "
            f"{_noun(pipeline, 'rank')} × {chunks}): use a multiple of {stages} --layers"
        )
    return stage_units(units, stages)


def _units_by_bytes(parsed: argparse.Namespace) -> tuple[Unit, ...]:
    _refuse(
        parsed,
        ("hidden", "feed_forward", "heads", "key_value_heads", "vocabulary"),
        "with --unit-bytes",
    )
    sizes: tuple[int, ...] = parsed.unit_bytes
    if len(sizes) == 1 and parsed.layers is None:
        raise ForecastError("--unit-bytes with one size needs --layers")
    if len(sizes) == 1:
        sizes *= parsed.layers
    elif parsed.layers not in (None, len(sizes)):
        raise ForecastError(f"--unit-bytes has {len(sizes)} sizes for --layers {parsed.layers}")
    dtype = _given(parsed.parameter_dtype, "bfloat16")
    itemsize = _DTYPES[dtype].itemsize
    for size in sizes:
        if size < itemsize or size % itemsize:
            raise ForecastError(f"--unit-bytes {size}: is no whole number of {dtype} elements")
    return Layers(tuple(size // itemsize for size in sizes)).units


def _units_by_width(parsed: argparse.Namespace) -> tuple[Unit, ...]:
    if parsed.layers is None or parsed.hidden is None:
        raise ForecastError("give --layers and --hidden, or --unit-bytes, or --trace")
    hidden: int = parsed.hidden
    heads, key_value_heads = parsed.heads, parsed.key_value_heads
    if (heads is None) != (key_value_heads is None):
        alone, other = ("heads", "key-value-heads") if heads else ("key-value-heads", "heads")
        raise ForecastError(f"--{alone} has no effect without --{other}")
    key_value_width = hidden
    if heads is not None:
        if hidden % heads or heads % key_value_heads:
            raise ForecastError(
                f"--hidden {hidden}, --heads {heads}, --key-value-heads {key_value_heads}: each "
                "must divide the one before it"
            )
        key_value_width = hidden // heads * key_value_heads
    return Decoder(
        layers=parsed.layers,
        hidden=hidden,
        feed_forward=_given(parsed.feed_forward, 256 * math.ceil(8 * hidden / (3 * 256))),
        key_value_width=key_value_width,
        vocabulary=_given(parsed.vocabulary, 0),
    ).units


def _forward(parsed: argparse.Namespace, unit: Unit, units: Sequence[Unit]) -> int:
    """Nanoseconds of a unit's forward."""
    if parsed.compute is None:
        return _by_tokens(parsed, unit.multiplied)
    _refuse(parsed, ("tokens", "tflops"), "with --compute")
    if unit.is_layer:
        return int(parsed.compute)
    layer = next(each for each in units if each.is_layer)
    return round(parsed.compute * unit.multiplied / layer.multiplied)


def _by_tokens(parsed: argparse.Namespace, elements: int) -> int:
    # A multiplication and an addition for every element and token.
    operations = 2 * elements * _given(parsed.tokens, _TOKENS)
    return round(operations / (_given(parsed.tflops, _TFLOPS) * 1e3))


def _collectives(parsed: argparse.Namespace, shards: int) -> Collectives:
    return Collectives(
        shards, _given(parsed.bandwidth, _BANDWIDTH), _given(parsed.latency, _LATENCY)
    )


def _traced(parsed: argparse.Namespace) -> Workload:
    _refuse(parsed, _SCHEDULED, "with --trace")
    file: Path = parsed.trace
    try:
        trace, measured = load_trace(file)
    except OSError as error:
        raise ForecastError(f"--trace {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ForecastError(f"--trace {error}") from error
    if not trace.events:
        raise ForecastError(f"--trace {file}: has no events")
    _require_plannable(trace.units, len(trace), f"--trace {file}")
    forwards = None
    if measured is None or any(
        each is not None for each in (parsed.compute, parsed.tokens, parsed.tflops)
    ):
        if parsed.compute is not None:
            _refuse(parsed, ("tokens", "tflops"), "with --compute")
        forwards = {unit.name: _traced_forward(parsed, unit) for unit in trace.units}
    else:
        _refuse(
            parsed, ("backward",), "on compute that was measured, without --compute or --tokens"
        )
    collectives = None
    if measured is None or any(
        each is not None for each in (parsed.ranks, parsed.bandwidth, parsed.latency)
    ):
        if parsed.ranks is None:
            why = (
                f"{file} has no measured durations"
                if measured is None
                else "--bandwidth and --latency replace what was measured"
            )
            raise ForecastError(f"{why}: give --ranks, how many shard a unit")
        if parsed.ranks == 1:
            raise ForecastError("--ranks 1: nothing is sharded, use 2 or more")
        collectives = _collectives(parsed, parsed.ranks)
    title = (
        f"{file.name}: {len(trace):,} {_noun(len(trace), 'event')} of {len(trace.units)} "
        f"{_noun(len(trace.units), 'unit')}"
    )
    if collectives is not None:
        title += f", sharded over {collectives.shards:,}"
    backward = _given(parsed.backward, _BACKWARD)
    return of_trace(title, trace, measured, forwards, backward, collectives)


def _traced_forward(parsed: argparse.Namespace, unit: UnitSpec) -> int:
    return int(parsed.compute) if parsed.compute is not None else _by_tokens(parsed, unit.elements)


# Budgets.


def _budgets(
    given: tuple[Budget, ...] | None, workload: Workload, reduce_gradients: ReduceGradients
) -> tuple[Budget, ...]:
    planned = reduce_gradients == "planned"
    if given is None:
        return _default_budgets(workload.traces, planned)
    smallest = min(
        size
        for trace in workload.traces
        for unit in trace.units
        for size in (unit.bytes, *((unit.gradient_bytes,) if planned and unit.trainable else ()))
    )
    for budget in given:
        if budget != EVERYTHING and 0 < budget < smallest:
            raise ForecastError(
                f"--budget {format_bytes(budget)} keeps nothing: the smallest unit is "
                f"{format_bytes(smallest)}; use 0 or more than that"
            )
    return tuple(dict.fromkeys(given))


def _default_budgets(traces: Sequence[Trace], planned: bool) -> tuple[Budget, ...]:
    """Nothing, an eighth, a quarter and half of what there is, everything."""
    most = max(
        everything(trace) if planned else sum(unit.bytes for unit in trace.units)
        for trace in traces
    )
    largest = max(
        max(unit.bytes, unit.gradient_bytes if planned else 0)
        for trace in traces
        for unit in trace.units
    )
    between = [max(largest, most // part) for part in (8, 4, 2)]
    return tuple(dict.fromkeys([0, *(each for each in between if each < most), EVERYTHING]))


# Checks and conversions.


def _require_plannable(units: Sequence[UnitSpec], events: int, what: str) -> None:
    if events * sum(unit.bytes + unit.gradient_bytes for unit in units) >= _MOST_BYTES:
        raise ForecastError(f"{what}: has units of more bytes than any machine has")


def _check_outputs(parsed: argparse.Namespace) -> None:
    for name in ("json", "picture"):
        file: Path | None = getattr(parsed, name)
        if file is None:
            continue
        try:
            is_folder, has_folder = file.is_dir(), file.parent.is_dir()
        except OSError as error:  # the name is too long
            raise ForecastError(f"--{name} {file}: {error.strerror}") from error
        if is_folder:
            raise ForecastError(f"--{name} {file}: is a folder")
        if not has_folder:
            raise ForecastError(f"--{name} {file}: there is no folder {file.parent}")
    if parsed.picture is not None and parsed.picture.suffix.lower() not in (".png", ".svg"):
        raise ForecastError(f"--picture {parsed.picture}: use .png or .svg")


def _refuse(parsed: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(parsed, name) is not None:
            raise ForecastError(f"--{name.replace('_', '-')} has no effect {why}")


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _checked(convert: Callable[[str], T]) -> Callable[[str], T]:
    """``convert`` with messages that argparse shows."""

    def checked(text: str) -> T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _listed(convert: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    return _checked(lambda text: tuple(convert(part.strip()) for part in text.split(",")))


def _whole(text: str) -> int:
    try:
        value = int(text.replace(",", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number, 1 or more")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number above 0")
    return value


def _size(text: str) -> int:
    size = byte_count(text)
    if size == 0:
        raise ValueError(f"{text} is nothing: use more than 0")
    return size


def _budget(text: str) -> Budget:
    if text == EVERYTHING:
        return EVERYTHING
    try:
        return byte_count(text)
    except ValueError as error:
        raise ValueError(
            str(error).replace("write 400MiB,", "write everything, 400MiB,")
        ) from error


def _prefetch(text: str) -> Prefetch | str:
    match text:
        case "one" | "timed":
            return text
        case "none":
            return 0
    try:
        return _whole(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: use one, none, timed, or a number of elements"
        ) from error
