"""A DataLoader with a sampler and a collate function: headway takes it apart for its ranks.

python examples/weighted_loader.py
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import headway


class Words(Dataset):
    """Words of 2 to 9 letters (1 to 26); one in eight is rare: it ends as it begins."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 10, (count,), generator=draw).tolist()
        self.words = [torch.randint(1, 27, (length,), generator=draw) for length in lengths]
        for number, word in enumerate(self.words):
            word[-1] = word[0] if number % 8 == 0 else word[0] % 26 + 1

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.words[index], int(index % 8 == 0)


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    words, rare = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), torch.tensor(rare)


class Ends(nn.Module):
    """Scores of the two classes by a word's first and last letter; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(27, 16, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        last = words.gather(1, (words > 0).sum(dim=1, keepdim=True) - 1)
        return self.head(self.letters(words[:, 0]) * self.letters(last[:, 0]))


train, test = Words(512, seed=0), Words(128, seed=1)
often = WeightedRandomSampler([7.0 if rare else 1.0 for _, rare in train], len(train))
recipe = headway.Recipe(
    name="weighted", model=Ends, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam,
    data=DataLoader(train, batch_size=32, sampler=often, collate_fn=collate),  # states the batch
    validation=DataLoader(test, collate_fn=collate), stop="6 epochs", validate_every=48,
)  # fmt: skip

if __name__ == "__main__":
    headway.verify(recipe, processes=2).check()
    print(headway.train(recipe, processes=2))
