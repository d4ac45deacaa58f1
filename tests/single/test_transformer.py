"""single: the transformer workload: its model and its recipes.

The texts of the real standard library are built once for this module, in a temporary folder.
"""

import json
import math

import pytest
import torch

from headway.errors import RecipeError
from headway.optim.warmup import warmup_then_cosine
from headway.run.recipe.recipe import Recipe
from headway.workloads import transformer
from headway.workloads.transformer import PROMPT, TransformerConfig, TransformerLM

DEMO_PARAMETERS = 644_224
SMALL = TransformerConfig(window=16, width=32, layers=2, heads=4)


def parameter_count(model):
    """Number of trained numbers; a tied weight counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Folder with both flat files of this interpreter's standard library."""
    folder = tmp_path_factory.mktemp("texts")
    for split in ("train", "validation"):
        transformer.text_file(split, directory=folder)
    return folder


def small_model(seed=0, **changes):
    torch.manual_seed(seed)
    return TransformerLM(TransformerConfig(**(vars(SMALL) | changes)))


def tokens(batch=3, length=16, seed=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


# ---- model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 16])
def test_logits_have_one_row_per_token(length):
    logits = small_model()(tokens(length=length))
    assert logits.shape == (3, length, 256)
    assert logits.dtype == torch.float32


def test_a_text_longer_than_the_window_is_an_error():
    with pytest.raises(ValueError, match="17 tokens do not fit a window of 16"):
        small_model()(tokens(length=17))


@pytest.mark.parametrize("changed", [0, 5, 15])
def test_a_token_changes_no_earlier_logits(changed):
    lm = small_model().double()
    before = tokens()
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % 256
    difference = (lm(before) - lm(after)).abs().amax(dim=(0, 2))
    assert (difference[:changed] == 0).all()
    assert (difference[changed:] > 1e-9).all()  # attention reaches every later position


def test_order_of_the_earlier_tokens_matters():
    lm = small_model().double()
    before = tokens()
    after = before[:, [1, 0, *range(2, 16)]]
    assert not torch.equal(lm(before)[:, -1], lm(after)[:, -1])


def test_scores_depend_on_the_distance_of_two_positions_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    turn = transformer.rotation(12, 8, like=query)
    queries, keys = (transformer.rotate(x.expand(1, 1, 12, 8), turn)[0, 0] for x in (query, key))
    scores = queries @ keys.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
    assert scores[0].std() > 0.01
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(12))


def test_a_shorter_text_gives_the_same_logits_and_bfloat16_nearly_so():
    lm = small_model()
    whole = lm(tokens())
    torch.testing.assert_close(lm(tokens()[:, :9]), whole[:, :9])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = lm(tokens())
    torch.testing.assert_close(half.float(), whole, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (SMALL, 34_176),
        (TransformerConfig(window=16, width=32, layers=2, heads=4, tied=False), 42_368),
        (TransformerConfig(window=16, width=32, layers=2, heads=1), 34_176),
    ],
)
def test_parameter_count(config, count):
    width, layers = config.width, config.layers
    block = 12 * width**2 + 13 * width  # four + eight squares; biases 4 + 5; two norms 4
    embeddings = (config.vocabulary * (1 if config.tied else 2) + config.window) * width
    assert parameter_count(TransformerLM(config)) == count
    assert count == layers * block + embeddings + 2 * width


def test_initial_weights_shrink_with_depth_only_where_they_write_to_the_stream():
    deep = small_model(width=64, layers=8)
    block = deep.blocks[3]
    for layer in (block.attention.query, block.feed_forward.up):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for layer in (block.attention.out, block.feed_forward.down):
        assert layer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
        assert not layer.bias.any()


def test_the_untrained_model_knows_nothing():
    logits = small_model()(tokens(batch=64))
    loss = transformer.next_byte_loss(logits, tokens(batch=64, seed=2))
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_dropout_acts_in_training_only_and_through_modules_only():
    lm = small_model(dropout=0.5)
    assert not torch.equal(lm(tokens()), lm(tokens()))
    for module in lm.modules():  # a mask that no nn.Dropout drew would survive this
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert torch.equal(lm(tokens()), lm.eval()(tokens()))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 30}, "width 30 is not a multiple of 2 x heads 4"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**(vars(SMALL) | sizes))


def test_generate_follows_its_seed_alone():
    lm = small_model().train()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = transformer.generate(lm, b"import ", 40, 1.0, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert transformer.generate(lm, b"import ", 40, 1.0, seed=3) == first
    assert transformer.generate(lm, b"import ", 40, 1.0, seed=4) != first
    assert first.startswith(b"import ")
    assert len(first) == 47
    assert lm.training


def test_generate_at_temperature_zero_takes_the_likeliest_byte():
    lm = small_model().eval()
    text = transformer.generate(lm, b"abc", 1, 0.0)
    assert text[-1] == lm(torch.tensor([[97, 98, 99]]))[0, -1].argmax().item()


def test_generate_needs_a_prompt():
    with pytest.raises(ValueError, match="prompt"):
        transformer.generate(small_model(), b"", 1)


# ---- recipe --------------------------------------------------------------------------------------


def small_recipe(texts, **changes):
    sizes = {
        "width": 32,
        "layers": 1,
        "heads": 2,
        "window": 32,
        "batch": 4,
        "steps": 20,
        "warmup": 4,
    }
    return transformer.recipe(**(sizes | {"learning_rate": 3e-3, "directory": texts} | changes))


def test_demo_is_a_recipe_for_two_processes():
    demo = transformer.demo()
    assert isinstance(demo, Recipe)
    assert demo.batch % 2 == 0
    assert demo.validate_every
    assert demo.checkpoint_every
    assert demo.clip == 1.0
    assert parameter_count(demo.model()) == DEMO_PARAMETERS


def test_steps_on_a_repeated_batch_lower_its_loss(texts):
    job = small_recipe(texts)
    torch.manual_seed(job.seed)
    lm = job.model()
    optimizer = job.optimizer(lm)
    scheduler = job.scheduler(optimizer)
    batch = job.data().read(range(4))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = job.loss(lm, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[1] < losses[0]
    assert losses[-1] < losses[0] - 0.1


def test_the_loss_is_the_mean_over_all_bytes():
    torch.manual_seed(0)
    logits, target = torch.randn(3, 5, 256, dtype=torch.float64), tokens(length=5)
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    torch.testing.assert_close(transformer.next_byte_loss(logits, target), each.mean())


def test_validation_is_a_fair_part_of_the_validation_text(texts):
    job = small_recipe(texts, validation_samples=10)
    everything = transformer.text_source("validation", 32, directory=texts)
    assert len(job.validation()) == 10
    last = everything.read([len(everything) * 9 // 10])[0]
    assert torch.equal(job.validation().read([9])[0], last)


def test_only_matrices_decay():
    lm = small_model()
    optimizer = transformer.adamw(lm, learning_rate=1e-3, weight_decay=0.1)
    decay = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decay)
    for name, parameter in lm.named_parameters():
        assert decay[id(parameter)] == (0.1 if parameter.dim() == 2 else 0.0), name


def test_the_learning_rate_rises_linearly_and_falls_by_a_cosine_with_plain_state():
    def start():
        optimizer = transformer.adamw(small_model(), learning_rate=1.0, weight_decay=0.1)
        return optimizer, warmup_then_cosine(optimizer, warmup=4, steps=24, end=0.1)

    optimizer, scheduler = start()
    rates = []
    for step in range(24):
        if step == 10:  # a resumed run goes on from what JSON keeps
            state = json.loads(json.dumps(scheduler.state_dict()))
            groups = optimizer.state_dict()
            optimizer, scheduler = start()
            optimizer.load_state_dict(groups)
            scheduler.load_state_dict(state)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    falling = [0.1 + 0.45 * (1 + math.cos(math.pi * (step - 4) / 20)) for step in range(4, 24)]
    assert rates == pytest.approx([0.25, 0.4375, 0.625, 0.8125, *falling])


def test_the_showcase_is_a_text(texts):
    text = small_recipe(texts).showcase(small_model())
    assert text.startswith(PROMPT.decode())
    assert len(text) > 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "width 32 is not a multiple of 2 x heads 3"),
        ({"warmup": 20}, "warmup of 20 steps does not fit 20 steps"),
        ({"warmup": 0}, "warmup of 0 steps"),
    ],
)
def test_sizes_that_make_no_recipe(texts, changes, message):
    with pytest.raises(RecipeError, match=message):
        small_recipe(texts, **changes)
