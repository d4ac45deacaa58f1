"""A causal language model of transformers from scratch: two stages, sharded optimiser state.

python examples/pipeline_language_model.py         # needs the package transformers
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import headway


def data() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 64, (64, 16), generator=draw)
    return [{"input_ids": row, "labels": row} for row in rows]


def recipe() -> headway.Recipe:
    return headway.Recipe(
        name="pipeline",
        model=lambda: GPT2LMHeadModel(GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=4,
        )),
        data=data,
        loss="tokens",
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch="16 samples", stop="8 steps",
        stages=2, zero=1, pipeline=headway.PipelinePlan(microbatches=4),
    )  # fmt: skip


if __name__ == "__main__":
    found = headway.plan(recipe(), "dgx-a100")  # what eight GPUs would run
    print(found.plan.mesh, found.plan.prediction)
    headway.verify(recipe(), processes=4, steps=2).check()  # here: 2 copies of 2 stages
    print(headway.train(recipe(), processes=4))
