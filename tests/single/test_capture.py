"""single: models of the literature as graphs: FLOPs, saved tensors, blocks, cuts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import rnn
from torch.utils.flop_counter import FlopCounterMode

from headway.capture import aten_trace, capture
from headway.documents import read_document
from headway.errors import PlanError
from headway.graph.model_graph import ModelGraph, Work
from headway.graph.operator_fusion import fuse_light_operators
from headway.graph.repeated_blocks import find_repeated_blocks
from headway.graph.stage_boundaries import cut_points
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support import tiny_models
from support.big_models import (
    OVERFEAT_FAST,
    VGG_A,
    Dlrm,
    Encoder,
    ResNet50,
    UNet,
    ids,
    meta,
    plain_convolutions,
)
from support.on_demand import OnDemand
from support.sampling import sampled
from support.tracked import found, tracker_of

GPT = TransformerConfig(vocabulary=512, window=64, width=64, layers=3, heads=4, dropout=0.1)
MODELS = {
    "gpt": (lambda: TransformerLM(GPT), [ids(2, 64)]),
    "resnet": (ResNet50, [meta(4, 3, 224, 224)]),
    "unet": (UNet, [meta(2, 3, 64, 64)]),
    "dlrm": (Dlrm, [meta(8, 13), ids(4, 8, 3)]),
    "bert": (Encoder, [ids(2, 32), meta(2, 32, dtype=torch.bool)]),
    "vgg": (lambda: plain_convolutions(VGG_A), [meta(1, 3, 224, 224)]),
    "overfeat": (lambda: plain_convolutions(OVERFEAT_FAST), [meta(1, 3, 231, 231)]),
}


def built(name):
    with torch.device("meta"):
        return MODELS[name][0](), MODELS[name][1]


@pytest.fixture(scope="module")
def graphs():
    """Each model captured once."""
    return OnDemand(lambda name: capture(*_model_and_tuple(name)))


def _model_and_tuple(name):
    model, example = built(name)
    return model, tuple(example)


# -- FLOPs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled([*MODELS], 3))
def test_flops_are_those_of_torchs_counter(graphs, name):
    model, example = built(name)
    with FlopCounterMode(display=False) as counter:
        result = model(*example)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        result.sum().backward()
    flops = graphs[name].flops
    assert flops.forward == forward
    assert flops.input_gradient + flops.weight_gradient == counter.get_total_flops()
    assert graphs[name].unknown == ()


def test_a_gpt_has_the_flops_of_megatrons_formula():
    """72 B s L h^2 (1 + s / 6h + V / 12 L h), Narayanan et al. 2021, without recomputation."""
    config = TransformerConfig(vocabulary=50304, window=1024, width=768, layers=12, heads=12)
    with torch.device("meta"):
        model = TransformerLM(config)
    graph = capture(model, ids(8, 1024))
    assert graph.flops.total == 7_001_333_563_392


@pytest.mark.parametrize(("name", "giga", "mega"), [("vgg", 44.9, 36.9), ("overfeat", 16.0, 63.9)])
def test_das_ratio_of_computation_to_communication(graphs, name, giga, mega):
    """FLOPs / bytes = 1.5 ow oh MB per layer: 3 x 2 x ifm ofm k^2 ow oh over 4 ifm ofm k^2."""
    graph = graphs[name]
    layers = [o for o in graph.operators if o.kind == "conv2d"]
    assert len(layers) == (8 if name == "vgg" else 5)
    for layer in layers:
        weight, image = graph.tensors[layer.inputs[1]], graph.tensors[layer.outputs[0]]
        ratio = 3 * layer.flops.forward / weight.bytes
        assert ratio == 1.5 * image.shape[2] * image.shape[3]
    assert round(3 * graph.flops.forward / 1e9, 1) == giga
    assert round(graph.parameter_bytes / 1e6, 1) == mega


# -- saved tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "dlrm", "bert"])
def test_saved_tensors_are_what_torchs_tracker_finds_alive(graphs, name):
    """Behind the forward pass only saved tensors and the result are alive."""
    graph = graphs[name]
    make, example = MODELS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make()
        data = [torch.zeros(t.shape, dtype=t.dtype) for t in example]
        tracker = tracker_of(model, *data)
        with tracker:
            result = model(*data)
            alive = found(tracker, "current")[1]
    kept = {saved.name for operator in graph.operators for saved in operator.saved}
    results = sum(graph.tensors[name].bytes for name in graph.outputs if name not in kept)
    assert alive["activations"] == graph.saved_bytes + results
    assert alive["parameters"] == graph.parameter_bytes
    del result


def test_nothing_is_kept_without_gradients():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                x = self.first(x).relu()
            return self.second(x)

    graph = capture(Frozen(), torch.zeros(3, 4))
    linear, relu, second = graph.operators
    assert (linear.saved, relu.saved) == ((), ())
    assert linear.flops == Work(forward=96)
    assert second.flops == Work(forward=96, weight_gradient=96)
    assert [o.module for o in graph.operators] == ["first", "", "second"]


# -- names -----------------------------------------------------------------------------------------


def test_tied_parameters_stand_once_under_their_first_name(graphs):
    graph = graphs["gpt"]
    assert graph.tied == {"head.weight": "tokens.weight"}
    users = [o.module for o in graph.operators if "tokens.weight" in o.inputs]
    assert users == ["tokens", "head"]
    model, _ = built("gpt")
    assert list(graph.parameters) == [name for name, _ in model.named_parameters()]
    elements = sum(spec.elements for spec in graph.parameters.values())
    assert elements == sum(p.numel() for p in model.parameters())


def test_frozen_parameters_and_buffers_are_told_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    graph = capture(model, torch.zeros(3, 4))
    assert graph.frozen == ("0.weight",)
    assert set(graph.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert graph.flops == Work(forward=96)


def test_an_empty_tensor_is_captured():
    class Cached(nn.Module):  # as the keys of a cache that holds nothing yet
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            empty = x.new_empty(len(x), 0)
            return torch.relu(torch.cat([empty, self.layer(x)], dim=1)) * 2

    fused = fuse_light_operators(capture(Cached(), torch.zeros(3, 4)))
    assert fused.flops.forward >= 96


def test_windows_of_which_there_is_only_one_are_captured():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2, 2)
    )
    # 8, 4, 2, 1, and 12, 6, 3, 1: that all entries of the last are read is still known.
    for size in (8, 12):
        graph = capture(model, torch.zeros(2, 3, size, size))
        graph.check()
        fuse_light_operators(graph).check()


def test_the_model_stays_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = dict(model.named_parameters())
    capture(model, torch.randn(3, 4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())


def test_an_operator_that_writes_into_its_argument_is_what_later_ones_read():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            y.add_(1)
            return y.relu()

    graph = capture(InPlace(), torch.zeros(4))
    assert [o.kind for o in graph.operators] == ["mul", "add", "relu"]
    assert graph.operators[2].inputs == graph.operators[1].outputs


def test_a_loss_and_data_of_a_recipe():
    def loss(model, data):
        logits = model(data["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), data["next"].flatten(), reduction="sum"), 128

    model, _ = built("gpt")
    graph = capture(model, {"tokens": ids(2, 64), "next": ids(2, 64)}, loss=loss)
    assert graph.operators[-1].kind == "cross_entropy_loss"
    assert graph.outputs == graph.operators[-1].outputs
    assert [spec.shape for spec in graph.inputs.values()] == [(2, 64), (2, 64)]


class Experts(nn.Module):
    """Every token through its best two of four experts, by einsum with three operands."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 16))
        self.down = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        share = (F.one_hot(chosen, 4) * weights[..., None]).sum(1)
        hidden = torch.einsum("te,td,edf->tef", share, x, self.up).relu()
        return torch.einsum("tef,efd->td", hidden, self.down)


def test_what_has_no_formula_is_counted_by_torch_and_what_has_no_rule_is_named():
    model = Experts()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(6, 8))
    graph = capture(model, torch.zeros(6, 8))
    assert graph.unknown == ("one_hot",)
    assert graph.flops.forward == counter.get_total_flops()


def test_autocast_and_checkpointing_inside_of_a_model():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.first(x)
            return torch.utils.checkpoint.checkpoint(self.second, x.float(), use_reentrant=False)

    graph = capture(Mixed(), torch.zeros(4, 8))
    first, second = (o for o in graph.operators if o.kind == "linear")
    assert graph.values[first.outputs[0]].dtype == "bfloat16"
    assert first.flops == Work(forward=512, weight_gradient=512)
    assert graph.values[second.outputs[0]].dtype == "float32"
    assert [first.module, second.module] == ["first", "second"]


TINY = {
    tiny_models.HalfFrozen: (2, tiny_models.FEATURES),
    tiny_models.WithUnused: (2, tiny_models.FEATURES),
    tiny_models.TinyConv: (2, 1, 6, 6),
    tiny_models.Attention: (2, tiny_models.FEATURES),
    tiny_models.ComplexValued: (2, tiny_models.FEATURES),
    tiny_models.Residual: (2, tiny_models.FEATURES),
}


@pytest.mark.parametrize("kind", TINY)
def test_the_tiny_models_are_captured(kind):
    graph = capture(kind(), torch.zeros(TINY[kind]))
    assert graph.operators
    assert graph.outputs


# -- both ways of tracing --------------------------------------------------------------------------


def test_torch_fx_finds_the_same_as_torch_export(graphs, monkeypatch):
    def refuses(*_):
        raise RuntimeError("not today")

    monkeypatch.setattr(aten_trace, "_exported", refuses)
    for name in ("gpt", "dlrm"):
        graph, same = capture(*_model_and_tuple(name)), graphs[name]
        assert [o.kind for o in graph.operators] == [o.kind for o in same.operators]
        assert [o.module for o in graph.operators] == [o.module for o in same.operators]
        assert (graph.flops, graph.saved_bytes) == (same.flops, same.saved_bytes)
        assert graph.parameters == same.parameters


# -- blocks, cuts, folding -------------------------------------------------------------------------


def test_repeated_blocks(graphs):
    assert list(find_repeated_blocks(graphs["gpt"]).repeated.values()) == [3]
    assert list(find_repeated_blocks(graphs["bert"]).repeated.values()) == [4]
    bottlenecks = Counter(
        segment.structure
        for segment in find_repeated_blocks(graphs["resnet"]).segments
        if segment.module.count(".") == 1 and segment.module.startswith("layers.")
    )
    assert list(bottlenecks.values()) == [2, 3, 5, 2]
    found = find_repeated_blocks(graphs["gpt"]).segments
    assert [s.module for s in found] == ["", "blocks.0", "blocks.1", "blocks.2", ""]
    assert [s.start for s in found[1:]] == [s.stop for s in found[:-1]]


def test_the_first_block_is_like_the_others_without_dropout():
    """Its stream then is a view of the embeddings' sum."""
    with torch.device("meta"):
        model = TransformerLM(replace(GPT, dropout=0.0))
    graph = capture(model, ids(2, 64))
    assert list(find_repeated_blocks(graph).repeated.values()) == [3]
    assert list(find_repeated_blocks(fuse_light_operators(graph)).repeated.values()) == [3]


def test_a_difference_inside_of_a_block_is_seen():
    with torch.device("meta"):
        model = TransformerLM(GPT)
        model.blocks[1].feed_forward.up = nn.Linear(64, 256, bias=False)
    assert list(find_repeated_blocks(capture(model, ids(2, 64))).repeated.values()) == [2]


def test_cuts_lie_between_blocks_and_carry_the_stream(graphs):
    """B T D in float32; the rotations cross every block, but a stage makes them itself."""
    graph = graphs["gpt"]
    places = {cut.place: cut for cut in cut_points(graph)}
    for segment in find_repeated_blocks(graph).segments[1:]:
        assert places[segment.start].bytes == 2 * 64 * 64 * 4
        assert len(places[segment.start].tensors) == 1
    masked = {cut.place: len(cut.tensors) for cut in cut_points(graphs["bert"], 2)}
    assert [masked[s.start] for s in find_repeated_blocks(graphs["bert"]).segments[1:-1]] == [
        2,
        2,
        2,
        2,
    ]


@pytest.mark.parametrize("name", MODELS)
def test_folding_keeps_every_sum(graphs, name):
    graph = graphs[name]
    light = fuse_light_operators(graph)
    light.check()
    assert len(light.operators) < len(graph.operators)
    assert (light.flops, light.traffic) == (graph.flops, graph.traffic)
    assert (light.parameters, light.saved_bytes) == (graph.parameters, graph.saved_bytes)
    parts = sorted(part for o in light.operators for part in (o.parts or (o.name,)))
    assert parts == sorted(o.name for o in graph.operators)
    before, after = (
        find_repeated_blocks(graph).repeated.values(),
        find_repeated_blocks(light).repeated.values(),
    )
    assert list(after) == list(before) or name == "dlrm"  # a table's block is one operator then


def test_a_folded_block_keeps_the_splits_of_its_parts(graphs):
    light = fuse_light_operators(graphs["bert"])
    qkv = next(o for o in light.operators if o.module == "layers.0.qkv")
    heads = next(axis for axis in qkv.axes.loops if axis.size == 4)
    assert heads.kind == "free"
    assert qkv.axes.inputs[1].split()[0].split("*")[1] == heads.name  # 3 * heads * width
    down = next(o for o in light.operators if o.module == "layers.0.down")
    inner = next(axis for axis in down.axes.loops if axis.size == 256)
    assert (inner.kind, len(down.axes.added)) == ("sum", 2)  # bias and residual


@pytest.mark.parametrize("name", sampled([*MODELS], 2))
def test_a_graph_survives_its_file(graphs, tmp_path, name):
    path = tmp_path / "graph.json"
    path.write_text(graphs[name].to_json())
    assert read_document(path, ModelGraph) == graphs[name]
    assert read_document(path, ModelGraph).hash == graphs[name].hash


def test_the_same_model_gives_the_same_bytes(graphs):
    assert capture(*_model_and_tuple("bert")).to_json() == graphs["bert"].to_json()


# -- size and refusals -----------------------------------------------------------------------------


def test_a_model_that_fits_no_machine_here():
    """Two of the 96 layers of GPT-3 175B, and its vocabulary: 17 GB of parameters."""
    config = TransformerConfig(vocabulary=51200, window=2048, width=12288, layers=2, heads=96)
    with torch.device("meta"):
        model = TransformerLM(config)
    graph = capture(model, ids(1, 2048))
    assert graph.parameter_bytes > 17e9


def test_a_branch_by_numbers_is_refused_with_its_line():
    with pytest.raises(PlanError, match="SometimesUnused cannot be captured") as caught:
        capture(tiny_models.SometimesUnused(), torch.zeros(2, tiny_models.FEATURES))
    assert "tiny_models.py" in caught.value.where


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x if self.inner(x).sum().item() > 0 else x + 1


def test_what_cannot_be_captured_names_the_module_and_the_line():
    model = nn.Sequential(nn.Linear(4, 4), Decides())
    with pytest.raises(PlanError, match="module 1 \\(Decides\\) of Sequential") as caught:
        capture(model, torch.zeros(2, 4))
    assert "test_capture.py" in caught.value.where
    assert "torch.where" in caught.value.fix


def test_a_module_that_cannot_be_copied_is_refused():
    class Locked(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle a lock")

    with pytest.raises(PlanError, match="cannot be captured") as caught:
        capture(nn.Sequential(Locked(4, 4)), torch.zeros(2, 4))
    assert "cannot pickle a lock" in caught.value.problems[0]


def test_private_modules_of_torch_are_where_capture_expects_them():
    """`capture/fake_tensors.py` uses FakeTensorMode; if torch moves it, this says so first."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        made = torch.empty(10**7, 10**7)
    assert (made.device.type, made.shape[0], made.fake_mode is mode) == ("cpu", 10**7, True)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        lengths = torch.full((len(x),), 3)
        return self.lstm(rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data


def test_packed_sequences_are_named():
    with pytest.raises(PlanError, match="the lengths of a packed sequence"):
        capture(Packed(), torch.zeros(2, 5, 4))
