"""single: what of users' models is split, found without knowing their classes; what is refused."""

from __future__ import annotations

import json
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from headway.errors import PlanError
from headway.parallel.split_layers import infer_split
from headway.parallel.split_tensor import WHOLE_DIMENSION
from headway.parallel.tensor import DimensionCut
from headway.plans.tensor_layout import TensorGrid
from support import split_models as models

PAIR = TensorGrid.classic(2)
OUT, IN = (DimensionCut("j"), WHOLE_DIMENSION), (WHOLE_DIMENSION, DimensionCut("j"))


def of(model, plan=PAIR, loss=models.language_loss, batch=None, **settings):
    torch.manual_seed(0)
    return infer_split(model, loss, models.words() if batch is None else batch, plan, **settings)


def of_vectors(model, plan=PAIR, **settings):
    x, y = models.vectors()
    return of(model, plan, models.square_loss, (x.float(), y.float()), **settings)


def test_attention_with_three_layers_is_split_by_heads():
    found = of(models.Gpt("separate"))
    for name in ("q", "k", "v"):
        assert found.cuts[f"h.0.attention.{name}.weight"] == OUT
        assert found.cuts[f"h.0.attention.{name}.bias"] == (DimensionCut("j"),)
    assert found.cuts["h.1.attention.o.weight"] == IN
    assert found.cuts["h.1.mlp.net.0.weight"] == OUT
    assert found.cuts["h.1.mlp.net.2.weight"] == IN
    assert found.cuts["wte.weight"] == OUT  # and with it the tied head
    whole = {name for name, cuts in found.cuts.items() if not any(cut.axes for cut in cuts)}
    assert whole == {
        name
        for name in found.cuts
        if "norm" in name or name == "wpe.weight" or name.endswith(("o.bias", "2.bias"))
    }
    assert found.companions == {f"h.{n}.attention.{x}.weight" for n in (0, 1) for x in "qkv"}
    assert not found.left
    assert pickle.loads(pickle.dumps(found)) == found


def test_layers_that_hold_several_are_split_in_blocks():
    fused = of(models.Gpt("fused"))
    assert fused.cuts["h.0.attention.qkv.weight"] == (DimensionCut("j", 3), WHOLE_DIMENSION)
    assert fused.cuts["h.0.attention.proj.weight"] == IN
    grouped = of(models.Gpt("grouped"))
    assert grouped.cuts["h.0.attention.kv.weight"] == (DimensionCut("j", 2), WHOLE_DIMENSION)
    assert grouped.cuts["h.0.mlp.up.weight"] == (DimensionCut("j", 2), WHOLE_DIMENSION)
    torchs = of(models.Encoder())
    assert torchs.cuts["layers.layers.0.self_attn.in_proj_weight"] == (
        DimensionCut("j", 3),
        WHOLE_DIMENSION,
    )
    assert torchs.cuts["layers.layers.0.self_attn.out_proj.weight"] == IN


def test_on_a_cube_everything_is_cut_three_times():
    found = of(models.Gpt("fused"), TensorGrid.cuboid(2, 2, 2))
    assert found.cuts["h.0.attention.qkv.weight"] == (DimensionCut("ji", 3), DimensionCut("l"))
    assert found.cuts["h.0.attention.proj.weight"] == (DimensionCut("li"), DimensionCut("j"))
    assert found.cuts["wte.weight"] == (DimensionCut("ji"), DimensionCut("l"))
    assert found.cuts["h.0.norm1.weight"] == (DimensionCut("l"),)


class Single(nn.Module):
    """One head of keys for all queries; a gate that nothing sums up; raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 8)
        self.o = nn.Parameter(torch.randn(16, 16))
        self.gate = nn.Linear(16, 16)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (z.unsqueeze(1) for z in self.kv(x).split(4, -1))
        y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return (y.transpose(1, 2).flatten(2) @ self.o) * self.gate(x).sigmoid()


def test_what_no_pair_encloses_is_whole_with_the_reason():
    found = of_vectors(Single())
    assert found.cuts["q.weight"] == OUT
    assert found.cuts["o"] == (
        DimensionCut("j"),
        WHOLE_DIMENSION,
    )  # inputs first, as a parameter of x @ o is
    assert set(found.left) == {"kv.weight", "gate.weight"}
    assert "it meets a whole activation" in found.left["gate.weight"]
    tower = of_vectors(models.Tower())
    assert set(tower.left) == {"enter.weight"}
    assert (tower.cuts["up.weight"], tower.cuts["down.weight"]) == (OUT, IN)


def test_what_the_user_wants_whole_is_whole():
    found = of(models.Gpt("separate"), whole=["wte", "h.0", "*.mlp.net.*.weight"])
    cut = {name for name, cuts in found.cuts.items() if any(c.axes for c in cuts)}
    assert {name.rpartition(".")[0] for name in cut} == {f"h.1.attention.{x}" for x in "qkvo"}


def test_a_tied_weight_is_meant_by_each_of_its_names():
    for name in ("wte", "head"):
        assert of(models.Gpt("fused"), whole=[name]).cuts["wte.weight"] == ()


@pytest.mark.parametrize("option", ["whole", "only"])
def test_a_name_that_means_nothing_is_refused_with_the_nearest_ones(option):
    said = f"split.{option} h.0.atention: no parameter .* under it; did you mean h.0.attention"
    with pytest.raises(PlanError, match=said):
        of(models.Gpt("fused"), **{option: ["head", "h.0.atention"]})


def test_modules_on_a_grid_of_their_own():
    square = TensorGrid.summa(2)
    found = of(models.Gpt("fused"), TensorGrid.classic(4), whole=["*"], by=[("h.*.mlp", square)])
    assert found.islands == {"h.0.mlp": square, "h.1.mlp": square}
    assert found.cuts["h.0.mlp.net.0.weight"] == (DimensionCut("j"), DimensionCut("i"))
    assert found.cuts["h.0.attention.qkv.weight"] == ()
    only = of(models.Gpt("fused"), only=["h.1.mlp"])
    cut = {name for name, cuts in only.cuts.items() if any(one.axes for one in cuts)}
    assert cut == {f"h.1.mlp.net.{n}" for n in ("0.weight", "0.bias", "2.weight")}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("nothing.*", "no module has this name"), ("wte", "is shared with the rest")],
)
def test_what_cannot_have_a_grid_of_its_own_is_refused(pattern, said):
    with pytest.raises(PlanError, match=said):
        of(models.Gpt("fused"), by=[(pattern, TensorGrid.cuboid(2, 1, 1))])


@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        (models.Gpt("separate"), TensorGrid.classic(8), "4 over j = 8; legal degrees: 1, 2, 4"),
        (models.Gpt("fused"), TensorGrid.classic(3), "vocabulary: 32 over j = 3"),
        (
            models.Gpt("separate"),
            TensorGrid.cuboid(3, 1, 1),
            "of a micro-batch: 8 over i = 3; legal",
        ),
        (models.Gpt("grouped"), TensorGrid.classic(4), "2 over j = 4; legal degrees: 1, 2"),
        (models.Gpt("fused"), TensorGrid.cuboid(1, 8, 2), "4 over j = 8; legal degrees: 1, 2, 4"),
    ],
)
def test_degrees_that_do_not_divide_are_named_with_the_legal_ones(model, plan, said):
    with pytest.raises(PlanError) as caught:
        of(model, plan)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("model", "plan", "patterns"),
    [
        (models.Gpt("grouped"), TensorGrid.classic(4), ["h.*.attention.kv"]),
        (nn.Sequential(*(nn.Linear(16, n) for n in (16, 16, 3))), PAIR, ["2"]),
    ],
)
def test_what_a_refusal_says_to_type_is_accepted(model, plan, patterns):
    def loss(model, batch):
        return model(batch).square().mean()

    batch = models.words()[0] if isinstance(model, models.Gpt) else torch.zeros(8, 16)
    with pytest.raises(PlanError) as caught:
        of(model, plan, loss, batch)
    typed = re.search(r"--set 'split.whole=(.*?)'", caught.value.fix)
    assert typed
    assert json.loads(typed[1]) == patterns
    found = of(model, plan, loss, batch, whole=patterns)
    assert any(cut.axes for cuts in found.cuts.values() for cut in cuts)


class Odd(models.Tower):
    def forward(self, x):
        return torch.cumsum(super().forward(x), 1)


def test_on_a_cuboid_a_function_without_a_rule_is_refused_by_name():
    with pytest.raises(PlanError, match=r"cumsum at .*test_tensor_survey.py:\d+: there is no rule"):
        of_vectors(Odd(), TensorGrid.cuboid(1, 2, 1))
    assert not of_vectors(Odd()).left.get("up.weight")


class Twice(nn.Module):
    """A table that is the last layer as well, of what came to be whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)

    def forward(self, words):
        y = torch.cumsum(self.table(words), 1)
        return functional.linear(y, self.table.weight)


def test_a_weight_that_two_uses_want_otherwise_is_refused_by_name():
    with pytest.raises(PlanError, match=r"table.weight: .*its weight cut \[whole, over j\]"):
        of(Twice(), TensorGrid.cuboid(1, 2, 1))


def test_the_model_is_as_it_was():
    model = models.Gpt("fused")
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    numbers = {name: p.clone() for name, p in model.named_parameters()}
    of(model, TensorGrid.summa(2))
    assert before == {name: (type(m), id(m)) for name, m in model.named_modules()}
    assert all(torch.equal(p, numbers[name]) for name, p in model.named_parameters())


class Squared(torch.autograd.Function):
    """As a model's own activation with its own backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class OwnActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.third, self.fourth = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.second(Squared.apply(self.first(x)))
        return self.fourth(functional.relu(self.third(x)))


def test_a_layer_before_an_autograd_function_stays_whole():
    """A part is no tensor for it: its gradient would be lost."""
    found = of_vectors(OwnActivation())
    assert set(found.left) == {"first.weight"}
    assert "torch.autograd.Function" in found.left["first.weight"]
    assert found.cuts["third.weight"] == IN


@pytest.mark.parametrize("buffered", [False, True])
def test_a_mask_that_torch_compares_with_a_causal_one(buffered):
    found = of(models.Translator(buffered=buffered))
    for attention in ("self_attn", "multihead_attn"):
        name = f"layers.decoder.layers.0.{attention}"
        assert found.cuts[f"{name}.in_proj_weight"] == (DimensionCut("j", 3), WHOLE_DIMENSION)
        assert found.cuts[f"{name}.out_proj.weight"] == IN
    assert not found.left


def test_a_decision_by_numbers_of_weights_is_none_by_known_numbers():
    """The position is known, and not what the table has there."""

    class ByTable(models.Translator):
        def forward(self, words):
            here = self.words(torch.arange(4))
            return super().forward(words) if here.sum() > 0 else here

    with pytest.raises(PlanError, match="does not run without numbers"):
        of(ByTable())


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(16, 16)

    def forward(self, x):
        chosen = torch.where(x.sum(-1) > 0)
        return x.index_put(chosen, self.expert(x[chosen]))


def test_code_that_needs_numbers_is_refused_by_name():
    with pytest.raises(PlanError, match="does not run without numbers") as caught:
        of_vectors(Routed())
    assert "test_tensor_survey.py" in str(caught.value)
    assert "DynamicOutputShape" in str(caught.value)


def test_a_model_of_which_nothing_is_split_is_refused():
    with pytest.raises(PlanError, match="no layer of Conv1d is split over 2 ranks"):
        of_vectors(nn.Conv1d(3, 3, 3, padding=1))
    whole = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.raises(PlanError, match="all of them would compute the same"):
        of_vectors(whole, whole=["*"])


class SortedHeads(nn.Module):
    """Its layer is split as three blocks, and then something has no rule for parts."""

    def __init__(self):
        super().__init__()
        self.qkv, self.first, self.second = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(len(x), -1, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        heads = functional.scaled_dot_product_attention(q.sort(dim=1).values, k, v)
        x = heads.transpose(1, 2).reshape(x.shape)
        return self.second(functional.gelu(self.first(x)))


def test_a_layer_that_is_left_whole_needs_nothing_of_its_blocks():
    found = of_vectors(SortedHeads())
    assert set(found.left) == {"qkv.weight"}
    assert "sort" in found.left["qkv.weight"]
    assert found.cuts["first.weight"] == OUT


class Repeated(nn.Module):
    """As ALBERT: one block several times, whose first input is cut as no later one is."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.leave = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        x = self.enter(x)
        for _ in range(2):
            x = self.norm(x + self.down(self.up(x).relu()))
        return self.leave(x)


def test_a_norm_that_meets_cut_and_whole_activations_stays_whole():
    found = of_vectors(Repeated())
    assert found.cuts["leave.0.weight"] == OUT
    assert found.cuts["leave.2.weight"] == IN
    assert "its weight is cut, its input is not" in found.left["norm.weight"]


class Assigned(nn.Module):
    """As RWKV: a recurrence writes each step into a tensor."""

    def __init__(self):
        super().__init__()
        self.inner, self.other, self.leave = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        key = self.inner(x)
        output = torch.zeros_like(key)
        for number in range(len(x)):
            output[number] = key[number].tanh()
        return self.leave(self.other(output).relu())


def test_what_is_written_into_stays_whole():
    found = of_vectors(Assigned())
    assert "setitem" in found.left["inner.weight"]
    assert found.cuts["other.weight"] == OUT


def test_code_that_fails_for_another_reason_is_not_said_to_need_numbers():
    class Numpy(Assigned):
        def forward(self, x):
            return self.leave(torch.as_tensor(self.inner(x).detach().numpy()))

    with pytest.raises(PlanError, match="its code fails on stand-ins"):
        of_vectors(Numpy())
