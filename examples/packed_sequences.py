"""A recurrent tagger over packed sequences of different lengths; each word counts alike.

python examples/packed_sequences.py
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import headway


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 3)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embedding(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(output)


def sentences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (96,), generator=draw).tolist()
    words = [torch.randint(0, 50, (length,), generator=draw) for length in lengths]
    return [(sentence, sentence % 3) for sentence in words]


def collate(samples: list) -> dict[str, torch.Tensor]:
    words, tags = zip(*samples, strict=True)
    return {
        "words": pad_sequence(words, batch_first=True),
        "lengths": torch.tensor([len(sentence) for sentence in words]),
        "tags": pad_sequence(tags, batch_first=True, padding_value=-100),
    }


def loss(model: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over all words, and their number: sentences are split over ranks, words count."""
    scores = model(batch["words"], batch["lengths"])
    total = nn.functional.cross_entropy(scores.mT, batch["tags"], reduction="sum")
    return total, batch["lengths"].sum()


recipe = headway.Recipe(
    name="tagger", model=Tagger, data=sentences(), collate=collate, loss=loss,
    optimizer=torch.optim.Adam, batch="16 samples", stop="3 epochs",
)  # fmt: skip

if __name__ == "__main__":
    headway.verify(recipe, processes=2).check()
    print(headway.train(recipe, processes=2))
