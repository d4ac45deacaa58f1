"""single: what cannot be cut, or would silently compute something else, is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.errors import PlanError, RecipeError, RunError
from headway.parallel import cut, cut_module_chain, record_call
from headway.parallel.pipeline.partition.cut import run_stages
from headway.parallel.stages import ModelProxy, StageCompleted

DATA = (torch.randn(4, 8), torch.randint(4, (4,)))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class ByContent(Three):
    def forward(self, x):
        h = self.a(x)
        if h.sum() > 0:  # here
            h = -h
        return self.c(self.b(h))


class ByNumber(Three):
    def forward(self, x):
        h = self.a(x)
        if h.sum().item() > 0:  # here
            h = -h
        return self.c(self.b(h))


class Frozen(Three):
    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)  # here
        return self.c(self.b(h))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (ByContent, "decides by the numbers in a tensor"),
        (ByNumber, "decides by the numbers in a tensor"),
        (Frozen, "inside of torch.no_grad"),
    ],
)
def test_the_line_that_cannot_be_followed_is_named(build, why):
    with pytest.raises(PlanError, match=why) as error:
        cut(build(), loss, DATA, stages=2)
    file, _, line = error.value.where.partition(", in forward")[0].rpartition(":")
    with open(file) as source:
        assert "# here" in source.readlines()[int(line) - 1]
    assert "by hand" in error.value.fix


@pytest.mark.parametrize("build", [ByContent, ByNumber, Frozen])
def test_inside_of_a_module_it_does_not_matter(build):
    model = nn.Sequential(nn.Linear(8, 8), build(), nn.Linear(4, 4))
    stages = cut(model, loss, DATA, stages=3)
    assert [stage.calls for stage in stages] == [("0",), ("1",), ("2",)]
    with pytest.raises(PlanError, match="1 is one part, because") as error:
        cut(model, loss, DATA, stages=4)
    assert build.__name__ not in error.value.problems[0]


def test_code_that_counts_its_calls():
    class Counting(Three):
        calls = 0

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x)

    model = Counting()
    with pytest.raises(PlanError, match=r"it changes self\.calls"):
        cut(model, loss, DATA, stages=2)
    assert model.calls == 0
    inside = nn.Sequential(nn.Linear(8, 8), model)
    inside[1].calls = 5
    cut(inside, loss, DATA, stages=2)
    assert inside[1].calls == 5


def test_hooks_of_the_model():
    model = Three()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(PlanError, match="it has hooks"):
        cut(model, loss, DATA, stages=2)
    model = Three()
    model.a.register_forward_hook(lambda *_: None)
    cut(model, loss, DATA, stages=2)


def test_a_value_that_is_changed_in_place_behind_a_cut():
    class Seen(Three):
        def forward(self, x):
            h = self.a(x)
            k = self.b(h)
            torch.relu_(h)
            return self.c(k + h) + F.linear(h, self.c.weight)

    cut(Seen(), loss, DATA, at=["b"])
    with pytest.raises(PlanError, match="relu_ in stage 1 changes a in place, and linear in stage"):
        cut(Seen(), loss, DATA, at=["b", "c"])

    class Unseen(Three):  # through a view
        def forward(self, x):
            h = self.a(x)
            view = h.view(-1)
            k = self.b(h)
            return self.c(k + torch.relu_(h) + view.view(4, 8))

    with pytest.raises(PlanError, match="the output of the stages differs from the model's"):
        cut(Unseen(), loss, DATA, at=["b"])


def test_what_a_hook_collects_inside_of_a_module():
    class Collecting(Three):
        def forward(self, x):
            seen = []
            hook = self.b.register_forward_hook(lambda _, __, output: seen.append(output))
            h = self.b(self.a(x))
            if h.shape[0] > 0 and isinstance(h, torch.Tensor):
                hook.remove()
            return self.c(h) + (seen[0].sum() if seen else 0)

    with pytest.raises(PlanError, match="a hook has collected inside of a module"):
        cut(Collecting(), loss, DATA, stages=2)


def test_running_statistics_in_two_stages():
    class Shared(Three):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.c(self.norm(self.b(self.norm(self.a(x)))))

    with pytest.raises(PlanError, match="is updated in the forward, and the stages"):
        cut(Shared(), loss, DATA, stages=3)
    cut(Shared(), loss, DATA, at=["c"])


def test_another_path_than_the_first_micro_batch_took():
    class Sized(Three):
        def forward(self, x):
            h = self.a(x)
            if x.shape[0] > 5:  # here
                h = -h
            return self.c(self.b(h))

    model = Sized()
    stages = cut(model, loss, DATA, stages=2)
    more = (torch.randn(5, 8), torch.randint(4, (5,)))
    assert torch.equal(run_stages(stages, record_call(loss, model, more)), model(more[0]))
    many = (torch.randn(6, 8), torch.randint(4, (6,)))
    with pytest.raises(RunError, match="takes another path through the model: True") as error:
        run_stages(stages, record_call(loss, model, many))
    assert error.value.where.startswith(__file__)


def test_an_attribute_that_has_changed():
    class Scaled(Three):
        factor = 1.0

        def __init__(self):
            super().__init__()
            self.factor = 2.0

        def forward(self, x):
            return super().forward(x) * self.factor

    model = Scaled()
    stages = cut(model, loss, DATA, stages=2)
    stages.check()
    model.eval()
    stages.check()
    model.factor = 3.0
    with pytest.raises(RunError, match=r"factor of the model has changed.*\n.*2.0 and is 3.0"):
        stages.check()


# -- losses ----------------------------------------------------------------------------------------


def not_at_all(model, batch):
    return batch[0].sum()


def twice(model, batch):
    return model(batch[0]).sum() + model(batch[0]).sum()


def weighing(model, batch):
    return model(batch[0]).mean() + model.a.weight.square().sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (not_at_all, "does not call the model"),
        (twice, "calls the model more than once"),
        (weighing, r"the loss uses model\.a,"),
        (lambda m, b: sum(p.sum() for p in m.parameters()), "the loss uses model.parameters"),
        (lambda m, b: m.forward(b[0]).sum(), "the loss uses model.forward"),
    ],
)
def test_losses_that_use_the_model_otherwise(function, message):
    with pytest.raises(RecipeError, match=message) as error:
        cut(Three(), function, DATA, stages=2)
    assert function is not_at_all or error.value.where.startswith(__file__)


def test_a_derivative_by_the_inputs():
    """As in the loss of a differential equation; that by the output is within the last stage."""

    def residual(model, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)  # here
        return slope.square().mean()

    def by_output(model, batch):
        output = model(batch[0].clone().requires_grad_())
        value = F.cross_entropy(output, batch[1])
        return value + torch.autograd.grad(value, output, create_graph=True)[0].square().mean()

    with pytest.raises(RecipeError, match="asks for the gradient of the model's inputs") as error:
        cut(Three(), residual, DATA, stages=2)
    file, _, line = error.value.where.rpartition(":")
    with open(file) as source:
        assert "# here" in source.readlines()[int(line) - 1]
    cut(Three(), by_output, DATA, stages=2).check()


def test_what_a_loss_may_read_of_the_model():
    class WithCriterion(Three):
        def __init__(self):
            super().__init__()
            self.criterion = nn.Linear(4, 1)
            self.gain = 2.0

        def gained(self):
            return self.gain

    model = WithCriterion()

    def good(model, batch):
        assert model.training
        return model.criterion(model(batch[0])).mean() * model.gain

    stages = cut(model, good, DATA, stages=2)
    assert "criterion.weight" in stages[1].parameters
    stand_in = ModelProxy(model, lambda args, kwargs: model(*args, **kwargs), stages.foreign)
    assert torch.equal(stand_in.compute(good, DATA), good(model, DATA))
    with pytest.raises(RecipeError, match=r"the loss uses model\.a,") as error:
        stand_in.compute(weighing, DATA)
    assert "a.weight is in another stage" in error.value.why


def test_a_call_of_another_form():
    class Optional(Three):
        def forward(self, x, mask=None):
            return super().forward(x if mask is None else x * mask)

    stages = cut(Optional(), loss, DATA, stages=2)
    assert stages.leaves_of((DATA[0],), {}) == (DATA[0],)
    for args, kwargs in (((DATA[0], DATA[0]), {}), ((DATA[0],), {"mask": None})):
        with pytest.raises(RunError, match="calls the model in another way"):
            stages.leaves_of(args, kwargs)


def test_a_loss_is_cut_in_the_context_that_it_makes():
    """Types between stages are those of autocast."""

    class Typed(Three):
        def forward(self, x):
            h = self.a(x)
            return self.c(self.b(h.to(h.dtype)))

    def halved(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    def raising(model, batch):
        try:
            return model(batch[0]).sum()
        except Exception:  # must not catch what unwinds it
            return None

    stages = cut(Typed(), halved, DATA, stages=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_stages(stages, record_call(halved, stages.model, DATA)).dtype == torch.bfloat16
    assert record_call(raising, Three(), DATA).leaves == (DATA[0],)
    assert not issubclass(StageCompleted, Exception)


# -- by hand ---------------------------------------------------------------------------------------


class Chosen(ByContent):
    """Its modules in a row, after a decision that cannot be followed."""

    def forward(self, x):
        if x.sum().item() == 12.5:
            x = -x
        return self.c(torch.relu(self.b(self.a(x))))


def test_stages_by_hand():
    model = Chosen()
    with pytest.raises(PlanError, match="decides by the numbers"):
        cut(model, loss, DATA, stages=2)
    stages = cut_module_chain(model, loss, DATA, [["a", model.b], [nn.ReLU(), "c"]])
    assert [list(stage.parameters) for stage in stages] == [
        ["a.weight", "a.bias", "b.weight", "b.bias"],
        ["c.weight", "c.bias"],
    ]
    assert stages.edges == ((0, 1),)
    assert set(stages[0].module.state_dict()) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    found = run_stages(stages, record_call(loss, model, DATA))
    assert torch.equal(found, model(DATA[0]))


def test_modules_that_return_several_values_by_hand():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x * 2

    class Join(nn.Module):
        def forward(self, x, y):
            return x + y

    class Model(Three):
        def forward(self, x):
            return self.c(self.a(x) * 3)

    model = Model()
    stages = cut_module_chain(model, loss, DATA, [["a", Pair()], [Join(), "c"]])
    assert len(stages[0].gives) == 2
    assert torch.allclose(run_stages(stages, record_call(loss, model, DATA)), model(DATA[0]))


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ([["a"], ["d"]], "there is no module d"),
        ([["a"], [nn.Linear(8, 4)]], "Linear has parameters that the model does not have"),
        ([["a"], ["c"]], "differs from the model's"),
    ],
)
def test_chains_that_are_not_the_model(chain, message):
    with pytest.raises(PlanError, match=message):
        cut_module_chain(Chosen(), loss, DATA, chain)


class Remembering(Three):
    """As CTRL and memory networks: a buffer is set to what the forward pass has computed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(8))

    def forward(self, x):
        h = self.a(x) + self.memory
        self.memory = h.detach().mean(0)
        return self.c(self.b(h))


def test_a_buffer_that_is_set_anew_is_named_and_put_back():
    model = Remembering()
    held = model.memory
    with pytest.raises(PlanError, match=r"it changes self\.memory, which a graph would not"):
        cut(model, loss, DATA, stages=2)
    assert model.memory is held
    assert not held.any()


class FrozenInEvaluation(Three):
    """As RWKV: in evaluation mode it does something between its modules that a graph would not."""

    def forward(self, x):
        h = self.a(x)
        if not self.training:
            with torch.no_grad():
                h = h * 1.0
        return self.c(self.b(h))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = FrozenInEvaluation(), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x))


def test_a_cut_that_evaluation_mode_does_not_have_says_so():
    with pytest.raises(PlanError, match="in training mode, and not in evaluation mode") as found:
        cut(Body(), loss, DATA, at=["body.c"])
    assert "body is one part, because it computes something inside of" in str(found.value)
