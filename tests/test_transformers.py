"""Model classes of the ``transformers`` package train under a context, compiled and from hooks.

They are taken as they are, with tiny random configurations and nothing downloaded:
keyword inputs, ModelOutputs, caches among the outputs, tied and shared embeddings,
mixtures of experts, checkpoints. Each row of the table says whether torch.compile
captures the model whole, or why it breaks the graph.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree as pytree

import fsdp_fx
from ranks import RankPools

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'fsdp-fx[test]'"
)

LONG = 280.0
VOCABULARY, WIDTH, LENGTH = 40, 32, 6
MICROBATCHES = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Batch = Mapping[str, Any]


def draw_text(generator: torch.Generator) -> Batch:
    """Two sequences, the second one padded."""
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def draw_images(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def draw_encoded(generator: torch.Generator) -> Batch:
    """What an encoder elsewhere has made: a ModelOutput among the inputs."""
    hidden = torch.randn(2, LENGTH, WIDTH, generator=generator)
    return {
        "encoder_outputs": transformers.modeling_outputs.BaseModelOutput(hidden.requires_grad_()),
        "labels": torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator),
    }


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    return model.model.layers


@dataclass(frozen=True)
class Architecture:
    """A model class, and what becomes of it under torch.compile.

    Attributes:
        model: name of the class; its configuration's is derived.
        config: its configuration.
        layers: the modules that are units of their own, beside the root.
        draw: makes a microbatch.
        loss: from the output.
        inputs: further keyword inputs.
        policy: mixed precision.
        output_dtype: of the root.
        checkpointing: whether to enable it, and how.
        options: of the context.
        breaks: what the reason of its first graph break says; None if it is captured whole.
        runs_eagerly: whether its layers then run from their hooks.
        exact: whether sums are made in the order of the reference's.
    """

    model: str
    config: Mapping[str, Any]
    layers: Callable[[Any], Sequence[nn.Module]] = decoder_layers
    draw: Callable[[torch.Generator], Batch] = draw_text
    loss: Callable[[Any], torch.Tensor] = lambda output: output.loss
    inputs: Mapping[str, Any] = field(default_factory=dict)
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    output_dtype: torch.dtype | None = None
    checkpointing: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    breaks: str | None = None
    runs_eagerly: bool = False
    exact: bool = True

    def make(self) -> Any:
        """The model, in training mode, the same on every rank."""
        torch.manual_seed(17)
        family = self.model.partition("For")[0].removesuffix("LMHeadModel")
        config = getattr(transformers, f"{family}Config")(**self.config)
        config._experts_implementation = self.config.get("_experts_implementation")
        model = getattr(transformers, self.model)(config).train()
        if self.checkpointing is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # version 5.24 renames it
                model.gradient_checkpointing_enable(dict(self.checkpointing))
        return model


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {
    **DECODER,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", DECODER),
    "llama-checkpointed-bf16": Architecture(
        "LlamaForCausalLM",
        {**DECODER, "use_cache": False},
        policy=BF16,
        output_dtype=torch.float32,
        checkpointing={"use_reentrant": False},
    ),
    "gpt2": Architecture(  # the embedding is the head; Conv1D; dropout
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        layers=lambda model: model.transformer.h,
        options={"memory_budget": 80_000},
        breaks="logging.Logger method",  # it warns that it picks a loss
    ),
    "qwen-moe": Architecture(  # the default, grouped_mm, is not captured on the CPU by 5.17
        "Qwen2MoeForCausalLM", {**QWEN, "_experts_implementation": "batched_mm"}
    ),
    "mixtral-loop": Architecture(  # a loop over the experts that some token goes to
        "MixtralForCausalLM",
        {
            **DECODER,
            "num_hidden_layers": 1,
            "num_local_experts": 4,
            "_experts_implementation": "eager",
        },
        breaks="Dynamic shape operator",
        runs_eagerly=True,
        exact=False,
    ),
    "bert": Architecture(  # the first call installs the hooks that collect the outputs
        "BertForMaskedLM",
        {key: DECODER[key] for key in DECODER if not key.endswith(("heads", "token_id"))}
        | {"num_attention_heads": 4},
        layers=lambda model: model.bert.encoder.layer,
        inputs={"output_hidden_states": True},
        loss=lambda out: out.loss + sum(hidden.square().mean() for hidden in out.hidden_states),
        breaks="Unsupported context manager",
    ),
    "t5": Architecture(  # one embedding for encoder, decoder and head
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        layers=lambda model: [*model.encoder.block, *model.decoder.block],
        # Version 2.12 was not tried.
        breaks="copy.deepcopy()" if torch.__version__ < "2.12" else None,
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 5,
            "problem_type": "single_label_classification",  # else the first call sets it
        },
        layers=lambda model: model.vit.layers,
        draw=draw_images,
    ),
}


class Reference:
    """The model whole, on every rank's data."""

    def __init__(self, architecture: Architecture, model: nn.Module) -> None:
        self.architecture = architecture
        self.model = copy.deepcopy(model)

    def accumulate(self, step: int) -> list[list[float]]:
        """Add the averages of the microbatches' gradients; the losses by microbatch and rank."""
        losses = []
        world_size = dist.get_world_size()
        for microbatch in range(MICROBATCHES):
            losses.append([0.0] * world_size)
            averages: list[torch.Tensor] = []
            for rank in range(world_size):
                losses[-1][rank], gradients = self._gradients(step, microbatch, rank)
                for total, gradient in zip(averages, gradients, strict=False):
                    total += gradient
                averages = averages or gradients
            for parameter, average in zip(self.model.parameters(), averages, strict=True):
                average /= world_size
                parameter.grad = average if parameter.grad is None else parameter.grad + average
        return losses

    def _gradients(self, step: int, microbatch: int, rank: int) -> tuple[float, list[torch.Tensor]]:
        working = copy.deepcopy(self.model)
        dtype = self.architecture.policy.param_dtype
        for parameter in working.parameters():
            parameter.grad = None
            parameter.data = parameter.data.to(dtype or parameter.dtype)  # buffers stay
        output = forward(self.architecture, working, step, microbatch, rank, dtype)
        loss = self.architecture.loss(output)
        loss.backward()
        gradients = []
        for name, parameter in working.named_parameters():
            # For what was not used, a unit that has run is reduced with zeros.
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            gradients.append(gradient.to(self.architecture.policy.reduce_dtype or gradient.dtype))
            assert gradient.isfinite().all(), name
        return loss.item(), gradients


def forward(
    architecture: Architecture,
    model: Callable[..., Any],
    step: int,
    microbatch: int,
    rank: int,
    dtype: torch.dtype | None = None,
) -> Any:
    """The output on one rank's data, with the same random numbers wherever it is computed.

    Inputs are cast to ``dtype``, as FSDP2 does by itself.
    """
    seed = 100 * step + 10 * microbatch + rank
    batch = architecture.draw(torch.Generator().manual_seed(seed))

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype or tensor.dtype) if tensor.is_floating_point() else tensor

    batch = pytree.tree_map_only(torch.Tensor, cast, batch)
    torch.manual_seed(seed)
    return model(**batch, **architecture.inputs)


@dataclass(frozen=True)
class Training:
    """A sharded model on a context beside its reference.

    Attributes:
        architecture: its row.
        model: the model.
        run: what is called: the model, or what torch.compile returned for it.
        context: the context.
        reference: the reference.
        optimizers: of both.
        tolerance: None for equality.
    """

    architecture: Architecture
    model: Any
    run: Any
    context: fsdp_fx.FSDPContext
    reference: Reference
    optimizers: Sequence[torch.optim.Optimizer]
    tolerance: float | None

    def step(self, number: int, order: str) -> None:
        """One window, compared with the reference."""
        rank = dist.get_rank()
        stats, before = self.context.stats, copy.copy(self.context.stats)
        waiting: list[torch.Tensor] = []
        losses = []
        actions = iter(range(MICROBATCHES))
        for action in order:
            if action == "F":
                microbatch = next(actions)
                output = forward(self.architecture, self.run, number, microbatch, rank)
                self._require_dtype(output)
                waiting.append(self.architecture.loss(output))
                losses.append(waiting[-1].item())
            else:
                waiting.pop(0).backward()
        self.context.finish_grad_sync()
        for unit in self.context.units:
            assert not any((unit.unsharded, unit.in_flight, unit.holds)), unit.spec.name
        if stats.replayed_windows > before.replayed_windows:
            program = self.context.program
            assert program is not None
            nodes = [getattr(n.target, "__name__", "") for n in program.graph_module.graph.nodes]
            assert stats.gathers - before.gathers == nodes.count("gather")
            assert stats.reductions - before.reductions == nodes.count("reduce")
            assert stats.on_demand_gathers - before.on_demand_gathers == 1
        expected = self.reference.accumulate(number)
        self._compare("loss", torch.tensor(losses), torch.tensor([each[rank] for each in expected]))
        self._compare_all("gradient", lambda parameter: parameter.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._compare_all("weight", lambda parameter: parameter)

    def _require_dtype(self, output: Any) -> None:
        """A cast reaches a ModelOutput's fields, its keys and its positions."""
        if self.architecture.output_dtype is not None:
            for logits in (output.logits, output["logits"], output[1]):
                assert logits is output.logits
                assert logits.dtype == self.architecture.output_dtype

    def _compare_all(self, what: str, read: Callable[[nn.Parameter], Any]) -> None:
        whole = dict(self.reference.model.named_parameters())
        world_size, rank = dist.get_world_size(), dist.get_rank()
        for name, parameter in self.model.named_parameters():
            wanted = read(whole.pop(name)).detach()
            parts = torch.chunk(wanted, world_size)
            part = parts[rank] if rank < len(parts) else wanted[:0]
            found = read(parameter)
            if found is None:
                assert not part.any(), f"no {what} of {name}"
                continue
            self._compare(f"{what} of {name}", found.to_local().detach(), part)
        assert not whole

    def _compare(self, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if self.tolerance is None:
            assert torch.equal(found, wanted), f"{what} is off by {(found - wanted).abs().max()}"
            return
        scale = wanted.norm() + 1e-2 * wanted.numel() ** 0.5
        error = (found - wanted).norm()
        assert error <= self.tolerance * scale, f"{what} is off by {error} of {scale}"


def set_up(
    architecture: Architecture,
    compiled: Mapping[str, Any] | None,
    in_place: bool = False,
    tolerance: float | None = None,
) -> Training:
    """Shards and adopts a model and, with options for the backend, compiles it."""
    model = architecture.make()
    reference = Reference(architecture, model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = architecture.policy
    for layer in architecture.layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=architecture.output_dtype))
    context = fsdp_fx.FSDPContext(mode="recorded", **architecture.options)
    context.adopt(model)
    run = model
    if compiled is not None and in_place:
        model.compile(backend="fsdp_fx", options=compiled)
    elif compiled is not None:
        run = torch.compile(model, backend="fsdp_fx", options=compiled)
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for module in (model, reference.model)
    ]
    if tolerance is None and not architecture.exact:
        tolerance = 1e-5
    return Training(architecture, model, run, context, reference, optimizers, tolerance)


def train(training: Training) -> None:
    """Either order of two microbatches, recorded once and then replayed."""
    context = training.context
    for number, order in enumerate(["FBFB"] * 3 + ["FFBB"] * 3):
        training.step(number, order)
    stats = context.stats
    assert (stats.recorded_windows, stats.divergences) == (2, 1), "once for each order"
    assert stats.replayed_windows == 4


def _compiled(name: str, region_compiler: str, in_place: bool, tolerance: float | None) -> None:
    counters.clear()
    training = set_up(
        ARCHITECTURES[name], {"region_compiler": region_compiler}, in_place, tolerance
    )
    train(training)
    _say_what_fell_back(training)
    if name == "llama":
        _use_between_windows(training)


def _say_what_fell_back(training: Training) -> None:
    architecture, context = training.architecture, training.context
    reasons = list(counters["graph_break"])
    eager = [
        each for each in context.fallbacks if each.what in ("ran eagerly", "ran from its hooks")
    ]
    layers = len(architecture.layers(training.model))
    if architecture.breaks is None:
        assert not reasons, reasons
        assert counters["stats"]["unique_graphs"] == 1
    else:
        assert architecture.breaks in reasons[0]
    if architecture.runs_eagerly:
        assert len(eager) == layers, "every layer"
        assert all(architecture.breaks in each.why for each in eager)
        assert all(str(each) in context.explain() for each in eager)
    else:
        assert not eager
        scheduled = {key.direction for key in context.compiled_graphs}
        assert scheduled == {"forward", "backward"}


def _use_between_windows(training: Training) -> None:
    """Evaluation, generation and checkpoints leave the program as it is."""
    model, context, whole = training.model, training.context, training.reference.model
    stats = copy.copy(context.stats)
    batch = draw_text(torch.Generator().manual_seed(dist.get_rank()))
    whole.eval()
    training.run.eval()
    with torch.no_grad():
        found, wanted = training.run(**batch), whole(**batch)
    assert torch.equal(found.loss, wanted.loss)
    assert torch.equal(found.logits, wanted["logits"])
    prompt = {key: batch[key][:1, :4] for key in ("input_ids", "attention_mask")}
    generate = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found, wanted = (
        training.run.generate(**prompt, **generate),
        whole.generate(**prompt, **generate),
    )
    assert torch.equal(found, wanted)
    assert found.shape == (1, 9)
    whole.train()
    training.run.train()

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with tempfile.TemporaryDirectory() as directory:
        if dist.get_rank() == 0:
            model.save_pretrained(directory, state_dict=state)
            loaded = type(whole).from_pretrained(directory)
            for name, parameter in whole.named_parameters():
                assert torch.equal(parameter, loaded.get_parameter(name)), name

    assert context.stats.windows == stats.windows
    training.step(6, "FFBB")
    assert context.stats.replayed_windows == stats.replayed_windows + 1


@pytest.mark.parametrize(
    "name",
    [
        # Each of these is near to another: a decoder, experts, an encoder.
        pytest.param(name, marks=pytest.mark.soak if name in ("llama", "qwen-moe", "bert") else ())
        for name in ARCHITECTURES
    ],
)
def test_compiled_model_trains_like_the_whole_one_and_says_what_fell_back(
    ranks: RankPools, name: str
) -> None:
    in_place = name == "bert"
    ranks(2).run(_compiled, name, "eager", in_place, None, timeout=LONG)


@pytest.mark.soak
def test_model_through_inductor_trains_like_the_whole_one(ranks: RankPools) -> None:
    ranks(2).run(_compiled, "vit", "inductor", False, 1e-4, timeout=LONG)


def _eager_variants() -> Iterator[tuple[str, Architecture]]:
    # Hooks on inputs add up what comes back to them in another order than autograd does:
    # T5's layers share a bias and what the encoder made, BERT's hidden states are in the loss.
    for name, row in ARCHITECTURES.items():
        yield name, replace(row, exact=row.exact and name not in ("t5", "bert"))
    t5 = ARCHITECTURES["t5"]
    yield (
        "reentrant checkpoints",
        replace(ARCHITECTURES["llama-checkpointed-bf16"], checkpointing={"use_reentrant": True}),
    )
    yield "ModelOutput as input", replace(t5, draw=draw_encoded, exact=False)
    yield "ModelOutput as input, bf16", replace(t5, draw=draw_encoded, policy=BF16, exact=False)


def _eager() -> None:
    for name, architecture in _eager_variants():
        try:
            train(set_up(architecture, None))
        except Exception as error:
            error.add_note(f"model: {name}")
            raise


def test_models_scheduled_from_hooks_train_like_the_whole_ones(ranks: RankPools) -> None:
    ranks(2).run(_eager, timeout=LONG)
