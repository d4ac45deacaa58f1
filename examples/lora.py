"""Fine-tune a causal language model of transformers with LoRA; random weights stand in for yours.

python examples/lora.py            # needs the package transformers
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import headway


class LoRA(nn.Module):
    """A frozen linear layer and a trainable product of low rank beside it (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def model() -> nn.Module:
    found = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )).requires_grad_(False)  # fmt: skip
    for layer in found.model.layers:  # LlamaForCausalLM.from_pretrained(...) has the same
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return found


def data() -> list[dict[str, torch.Tensor]]:
    """Sentences that count; the first four tokens are the prompt, which is not learned."""
    rows, ignored = [(torch.arange(12) + start) % 64 for start in range(64)], torch.full((4,), -100)
    return [{"input_ids": row, "labels": torch.cat([ignored, row[4:]])} for row in rows]


def recipe() -> headway.Recipe:
    return headway.Recipe(
        name="lora",
        model=model,
        data=data,
        loss=headway.huggingface.causal_lm,
        optimizer=lambda m: torch.optim.AdamW(
            [parameter for parameter in m.parameters() if parameter.requires_grad], lr=0.01
        ),
        batch="16 samples",
        stop="3 epochs",
    )


if __name__ == "__main__":
    headway.verify(recipe(), processes=2).check()
    print(headway.train(recipe(), processes=2))
