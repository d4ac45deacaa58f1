"""single: a loss that a split changes is found before training; the losses of huggingface count."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import headway
from headway import Executor, Recipe, criterion, huggingface
from headway.data import MicroBatch
from headway.errors import RecipeError
from headway.plans import data_parallel
from headway.run.step.loss_probe import explain_split_loss
from support.labelled_models import Labelled, Sentences, labelled, own_mean
from support.tiny_models import FEATURES, HalfFrozen, Mlp, Points, WithDropout


def micro_of(samples, count=8):
    data = default_collate([samples[i] for i in range(count)])
    return MicroBatch(positions=tuple(range(count)), data=data)


def explain(model, loss, *micros):
    return explain_split_loss(model.train(), loss, micros, lambda data: data)


class Wordwise(nn.Module):
    """Words behind the end are padding, which the loss leaves out by itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, 3)
        self.drop = nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.drop(self.inner(x)))


def padded_mean(model, batch):
    x, mask = batch
    return (model(x).square().sum(-1) * mask).sum() / mask.sum()


def padded_pair(model, batch):
    x, mask = batch
    return (model(x).square().sum(-1) * mask).sum(), mask.sum()


def padded_samples():
    torch.manual_seed(1)
    return [(torch.randn(FEATURES), torch.tensor(float(i % 3))) for i in range(8)]


def contrastive(model, batch):
    out = model(batch[0])
    return nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def noisy(model, batch):
    x = batch[0]
    return (model(x + torch.randn_like(x)) ** 2).mean()


def test_a_mean_over_ignored_labels_is_found_and_the_line_that_is_exact():
    torch.manual_seed(0)
    found = explain(Labelled(), own_mean, micro_of(Sentences()))
    assert 'write loss="tokens"' in found
    assert "not exactly the serial one" in found
    assert not explain(Labelled(), own_mean, micro_of(Sentences(ignore=False)))
    assert not explain(Labelled(), headway.huggingface.TokenLoss(), micro_of(Sentences()))
    assert explain(Labelled(), huggingface.masked_lm, micro_of(Sentences()))  # a wrong count


def test_one_label_in_a_thousand_is_enough():
    torch.manual_seed(0)
    samples = [dict(sample) for sample in (Sentences(ignore=False)[i] for i in range(8))]
    samples[5]["labels"] = samples[5]["labels"].clone()
    samples[5]["labels"][2] = -100
    assert explain(Labelled(), own_mean, micro_of(samples))


@pytest.mark.parametrize(
    ("model", "loss", "samples", "wrong"),
    [
        (Wordwise, padded_mean, padded_samples, True),
        (Wordwise, padded_pair, padded_samples, False),
        (Mlp, contrastive, Points, True),
        (Mlp, cross_entropy, Points, False),
        (WithDropout, cross_entropy, Points, False),
        (HalfFrozen, cross_entropy, Points, False),
        (Mlp, noisy, Points, False),
    ],
)
def test_what_depends_on_the_split_and_what_does_not(model, loss, samples, wrong):
    torch.manual_seed(0)
    built = model()
    found = explain(built, loss, micro_of(samples()))
    assert bool(found) == wrong, found
    if wrong:
        assert "return (losses.sum(), count)" in found


def test_micro_batches_of_one_sample_are_put_together():
    torch.manual_seed(0)
    samples = Sentences()
    alone = [MicroBatch(positions=(i,), data=default_collate([samples[i]])) for i in range(4)]
    assert explain(Labelled(), own_mean, *alone)
    assert not explain(Labelled(), own_mean, alone[0])


def test_the_probe_changes_nothing():
    torch.manual_seed(0)
    model = Wordwise().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    micro = micro_of(padded_samples())
    state = torch.get_rng_state()
    assert explain(model, padded_mean, micro)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_taken_apart_is_not_judged():
    def broken(model, batch):
        if len(batch[0]) < 8:
            raise ValueError("8 samples, please")
        return cross_entropy(model, batch)

    class Half(Mlp):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    micro = micro_of(Points())
    assert not explain(Mlp(), broken, micro)
    assert not explain(Half(), cross_entropy, micro)  # 16 bits round more than a wrong count moves
    time_first = MicroBatch(positions=tuple(range(8)), data=(torch.randn(5, 8, FEATURES),))
    assert not explain(Mlp(), lambda model, batch: model(batch[0]).mean(), time_first)


def test_a_router_is_named():
    torch.manual_seed(0)
    model = Labelled(routed=0.5)
    found = explain(model, headway.huggingface.TokenLoss(), micro_of(Sentences()))
    assert "the router's loss of Labelled" in found
    assert "output_router_logits=False" in found


@contextmanager
def warned():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def executor(loss, **plan):
    torch.manual_seed(0)
    model = Labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Executor(model, optimizer, loss=loss, plan=data_parallel(8, processes=1, **plan))


@pytest.mark.parametrize(
    ("loss", "plan", "said"),
    [
        (own_mean, {"microbatch": 4}, 1),
        (own_mean, {}, 0),  # nothing is split
        ("tokens", {"microbatch": 4}, 0),
        (huggingface.causal_lm, {"microbatch": 3}, 0),
    ],
)
def test_an_executor_says_it_once_and_only_where_the_batch_is_split(loss, plan, said):
    with warned() as found, executor(loss, **plan) as run:
        for batch in run.batches(Sentences()):
            run.step(batch)
    assert sum("depends on how a batch is split" in str(one.message) for one in found) == said


@pytest.mark.parametrize("microbatch", [1, 3])
def test_tokens_in_micro_batches_are_the_mean_of_all(microbatch):
    found = []
    for plan in ({}, {"microbatch": microbatch}):
        with executor("tokens", **plan) as run:
            losses = [run.step(batch) for batch in run.batches(Sentences())]
            found.append((losses, [p.detach().clone() for p in run.model.parameters()]))
    (whole, one), (parts, other) = found
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=0)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("loss", "causal"),
    [(huggingface.causal_lm, True), (huggingface.masked_lm, False), (huggingface.TokenLoss(), True),
     (huggingface.TokenLoss(), False)],
)  # fmt: skip
def test_the_count_is_that_of_the_models_own_mean(loss, causal):
    torch.manual_seed(0)
    model = Labelled(causal=causal, dropout=0.0)
    batch = micro_of(Sentences()).data
    total, count = loss(model, batch)
    labels = batch["labels"][:, 1:] if causal else batch["labels"]
    assert int(count) == int((labels != -100).sum())
    torch.testing.assert_close(total / count, model(**batch).loss)


def test_a_micro_batch_without_labels_adds_nothing():
    torch.manual_seed(0)
    model = Labelled()
    batch = default_collate([Sentences()[3]])
    for loss in (huggingface.causal_lm, huggingface.TokenLoss()):
        total, count = loss(model, batch)
        total.backward()
        assert float(total.detach()) == float(count) == 0.0
        assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)


def test_what_the_names_do_not_fit_is_told():
    model = Labelled()
    with pytest.raises(RecipeError, match="finds no labels in the batch") as caught:
        huggingface.causal_lm(model, {"input_ids": torch.zeros(2, 3, dtype=torch.long)})
    assert "labels" in str(caught.value.fix)
    with pytest.raises(RecipeError, match="'token' is no loss: write loss=\"tokens\""):
        labelled("token")

    class Smooth(Labelled):
        def forward(self, input_ids, labels=None):
            out = super().forward(input_ids, labels)
            return out._replace(loss=out.loss * 0.9 + 0.3)

    with pytest.raises(RecipeError, match="cannot tell over which labels") as caught:
        huggingface.TokenLoss()(Smooth(), micro_of(Sentences()).data)
    assert "headway.huggingface.causal_lm" in str(caught.value.fix)


def test_a_recipe_file_says_it_in_one_word(tmp_path):
    from headway.run.recipe.factory import load_recipe

    text = """
name = "words"
loss = "tokens"
batch = 4
stop = 2
[model]
call = "support.labelled_models:Labelled"
[data]
call = "support.labelled_models:Sentences"
[optimizer]
call = "torch.optim:SGD"
lr = 0.1
"""
    (tmp_path / "recipe.toml").write_text(text)
    recipe = load_recipe(str(tmp_path / "recipe.toml"))
    assert isinstance(recipe, Recipe)
    _, count = recipe.loss(Labelled(), micro_of(Sentences()).data)
    assert int(count) > 0


def test_a_torch_criterion_is_no_matter():
    assert not explain(Mlp(), criterion(nn.CrossEntropyLoss()), micro_of(Points()))
    ignoring = criterion(nn.CrossEntropyLoss(ignore_index=1))
    assert "return (losses.sum(), count)" in explain(Mlp(), ignoring, micro_of(Points()))


@pytest.mark.parametrize(("name", "said"), [("mean_of_labels", 1), ("labelled", 0)])
def test_a_plan_that_splits_the_batch_says_it(name, said):
    with warned() as found:
        result = headway.plan(
            f"support.labelled_models:{name}", "dgx-a100", devices=2, runnable=True
        )
    assert result.chosen.degrees.microbatch < 8
    assert sum("depends on how a batch is split" in str(one.message) for one in found) == said
