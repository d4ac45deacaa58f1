"""single: a torch DataLoader taken apart gives the batches that torch's own loader gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from headway.api.training import default_plan
from headway.data import Cursor, Loader, as_examples
from headway.data.order import sampler_seed
from headway.errors import DataError, RecipeError
from headway.plans import BatchSplit
from headway.run.recipe.batch_units import stop_steps
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.training_data import recipe_epoch_length, training_data
from support import loader_recipes
from support.loader_recipes import ByLength, Sentences, padded, plain
from support.tiny_models import Points

BEGIN = Cursor(seed=5)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor(index)


def batches(examples, ranks=1, epochs=2, cursor=BEGIN, workers=0, drop_last=False):
    """The union over the ranks of the samples of every batch."""
    source = as_examples(examples)
    split = BatchSplit(samples=source.batch, microbatch=3)
    found: list[list[int]] = []
    for rank in range(ranks):
        options = {"rank": rank, "ranks": ranks, "cursor": cursor, "epochs": epochs}
        options |= {"workers": workers, "drop_last": drop_last or source.drop_last}
        with Loader(source, split, **options) as loader:
            for number, batch in enumerate(loader):
                found += [[]] * (number == len(found))
                own = [int(sample) for micro in batch.micros for sample in micro.data]
                found[number] = found[number] + own
    return found


def own_generator():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), batch_size=5),
    "in order, without the last": lambda: DataLoader(Numbers(), batch_size=5, drop_last=True),
    "generator": lambda: DataLoader(
        Numbers(), batch_size=5, shuffle=True, generator=own_generator()
    ),
    "weighted": lambda: DataLoader(
        Numbers(), 4, sampler=WeightedRandomSampler([1.0] * 9, 17, generator=own_generator())
    ),
    "with replacement": lambda: DataLoader(
        Numbers(), 4, sampler=RandomSampler(Numbers(), True, 17, generator=own_generator())
    ),
    "subset": lambda: DataLoader(
        Numbers(), 4, sampler=SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6], own_generator())
    ),
    "batches": lambda: DataLoader(Numbers(), batch_sampler=ByLength(23, 5)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_all_ranks_together_read_what_torch_reads(name):
    torch_reads, loader = LOADERS[name](), LOADERS[name]()
    wanted = [batch.tolist() for _ in range(2) for batch in torch_reads]
    for ranks in (1, 3):
        assert batches(loader, ranks) == wanted
    assert batches(loader, workers=1) == wanted


def test_a_run_that_resumes_goes_on_in_a_later_epoch():
    make = LOADERS["batches"]
    wanted = batches(make(), epochs=3)
    source = as_examples(make())
    split = BatchSplit(samples=5)
    with Loader(source, split, rank=0, ranks=1, cursor=BEGIN, epochs=3) as loader:
        cursors = [batch.after for batch in loader]
    for made in (0, 4, 5, 12):
        assert batches(make(), 2, 3, cursors[made]) == wanted[made + 1 :]


def test_global_generators_give_a_sampler_its_numbers_by_seed_and_epoch():
    state = torch.get_rng_state()
    loader = DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * 23, 17))
    found = batches(loader)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(0)
    assert batches(loader) == found  # not the state of the process
    assert batches(loader, cursor=Cursor(seed=6)) != found
    torch.default_generator.manual_seed(sampler_seed(5, 0))
    assert [batch.tolist() for batch in loader] == found[:5]
    torch.set_rng_state(state)


def test_a_shuffled_loader_is_headways_shuffle():
    loader = DataLoader(Numbers(), batch_size=5, shuffle=True)
    plain_source = as_examples(Numbers())
    with Loader(
        plain_source, BatchSplit(samples=5), rank=0, ranks=1, cursor=BEGIN, epochs=2
    ) as own:
        wanted = [batch.micros[0].data.tolist() for batch in own]
    assert batches(loader) == wanted


def test_shares_and_micro_batches_are_collated_of_their_own_samples():
    source = as_examples(Sentences(), padded)
    split = BatchSplit(samples=8, microbatch=2)
    with Loader(source, split, rank=1, ranks=2, cursor=BEGIN, epochs=1) as loader:
        micros = next(iter(loader)).micros
    assert [len(micro.data["tokens"]) for micro in micros] == [2, 2]
    for micro in micros:
        assert bool((micro.data["tokens"] != 0).any(0).all())  # no wider than its own samples


def test_a_loader_states_batch_and_steps():
    recipe = load_recipe(loader_recipes.by_length())
    assert recipe.batch == 12
    length = recipe_epoch_length(recipe, training_data(recipe))
    assert stop_steps(recipe, length) == 8
    recipe = load_recipe(loader_recipes.in_order())
    assert (recipe.batch, recipe.drop_last, recipe.workers) == (12, True, 1)
    recipe = load_recipe(replace(loader_recipes.weighted(), stop="70 samples"))
    assert stop_steps(recipe, recipe_epoch_length(recipe, training_data(recipe))) == 7


def test_an_object_whose_loader_states_the_batch_has_a_plan_before_workers_start():
    found = default_plan(loader_recipes.by_length(), 2)
    assert found is not None
    assert found.batch.samples == 12
    with pytest.raises(RecipeError, match="batch is missing"):
        default_plan(plain(Points), 2)


def distributed():
    return DataLoader(Points(), 4, sampler=DistributedSampler(Points(), 2, 0))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: plain(DataLoader(Points(), batch_size=8), batch=12), "8 samples, that of the"),
        (lambda: plain(DataLoader(Points(), 8, drop_last=True), batch=8), "leaves out the last"),
        (lambda: plain(distributed), "DistributedSampler"),
        (lambda: plain(DataLoader(Points(), batch_size=None)), "batch_size=None"),
        (lambda: plain(Points), "batch is missing"),
        (
            lambda: plain(DataLoader(Sentences(), 8, collate_fn=padded), collate=padded),
            "collate is given twice",
        ),
        (lambda: plain(as_examples(Numbers()), batch=4, collate=padded), "does not fit a"),
    ],
)
def test_what_does_not_go_together_is_said_in_a_sentence(make, says):
    with pytest.raises((DataError, RecipeError), match=says) as caught:
        training_data(load_recipe(make()))
    assert caught.value.fix


def test_subsets_and_the_first_of_them_only():
    sampler = SubsetRandomSampler(range(10), own_generator())
    source = as_examples(DataLoader(Subset(Numbers(), range(20)), 4, sampler=sampler))
    options = {"rank": 0, "ranks": 1, "cursor": BEGIN, "shuffle": False, "limit": 6}
    with Loader(source, BatchSplit(samples=4), epochs=1, **options) as loader:
        sizes = [batch.samples for batch in loader]
    assert sizes == [4, 2]
    with Loader(source, BatchSplit(samples=4), **options) as loader:
        assert len(list(islice(loader, 5))) == 5
