"""Forty models as people have them, each with data and a recipe: what `models.py` makes a table of.

Twenty are of `transformers` (built from a configuration, with random weights), ten of torchvision
and timm, ten are written here as users write theirs. They are as small as their kind allows, and
nothing in them knows about headway.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from headway import Recipe

SAMPLES = 64
BATCH = 8
VOCABULARY = 64
LENGTH = 12


@dataclass(frozen=True)
class Case:
    """A model of the list.

    Attributes:
        source: "transformers", "timm", "torchvision" or "own".
        recipe: As `headway verify model_zoo:NAME` calls it.
        settings: By a cell's name what headway tells its user to add there (`models.CELLS`).
    """

    name: str
    source: str
    recipe: Callable[[], Recipe]
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


CASES: dict[str, Case] = {}


class Drawn(Dataset[Any]):
    """Samples drawn once from a seed: a dict of tensors each."""

    def __init__(self, draw: Callable[[torch.Generator], dict[str, Tensor]]) -> None:
        self._columns = draw(torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


def tokens(generator: torch.Generator, length: int = LENGTH, low: int = 3) -> Tensor:
    return torch.randint(low, VOCABULARY, (SAMPLES, length), generator=generator)


def add(
    name: str,
    source: str,
    model: Callable[[], nn.Module],
    draw: Callable[[torch.Generator], dict[str, Tensor]],
    loss: Callable[[nn.Module, Any], Tensor],
    **settings: tuple[str, ...],
) -> None:
    """Put a model on the list; its recipe becomes an attribute of this module."""

    def recipe() -> Recipe:
        return Recipe(
            name=name,
            model=model,
            data=lambda: Drawn(draw),
            loss=loss,
            optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
            batch=f"{BATCH} samples",
            stop="2 steps",
        )

    recipe.__name__ = recipe.__qualname__ = name
    globals()[name] = recipe
    CASES[name] = Case(name, source, recipe, settings)


# -- transformers ---------------------------------------------------------------------------------


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that models of `transformers` compute when they are given labels."""
    loss: Tensor = model(**batch).loss
    return loss


def of_transformers(
    name: str,
    architecture: str,
    draw: Callable[[torch.Generator], dict[str, Tensor]],
    **settings: Any,
) -> None:
    """A model of `transformers` by its class and the settings of its configuration."""

    def model() -> nn.Module:
        declare_torchvision_operators()  # transformers imports it where it is installed
        library = importlib.import_module("transformers")
        kind = getattr(library, architecture)
        built: nn.Module = kind(kind.config_class(**settings))
        return built

    add(name, "transformers", model, draw, own_loss)


def language(generator: torch.Generator) -> dict[str, Tensor]:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def masked_language(generator: torch.Generator) -> dict[str, Tensor]:
    ids = tokens(generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def sentences(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(0, 2, (SAMPLES,), generator=generator)
    return {"input_ids": tokens(generator), "labels": labels}


def translation(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": tokens(generator), "labels": tokens(generator, 8)}


def speech(generator: torch.Generator) -> dict[str, Tensor]:
    features = torch.randn(SAMPLES, 16, 40, generator=generator)
    return {"input_features": features, "labels": tokens(generator, 8)}


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    values = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return {"pixel_values": values, "labels": torch.randint(0, 2, (SAMPLES,), generator=generator)}


LLAMA_LIKE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT_LIKE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
SPECIAL: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

of_transformers(
    "gpt2", "GPT2LMHeadModel", language,
    vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=4, n_head=4, **SPECIAL,
)  # fmt: skip
of_transformers("llama", "LlamaForCausalLM", language, **LLAMA_LIKE)
of_transformers("mistral", "MistralForCausalLM", language, **LLAMA_LIKE, sliding_window=8)
of_transformers("qwen3", "Qwen3ForCausalLM", language, **LLAMA_LIKE, head_dim=8)
of_transformers("gemma2", "Gemma2ForCausalLM", language, **LLAMA_LIKE, head_dim=8)
of_transformers(
    "mixtral", "MixtralForCausalLM", language,
    **LLAMA_LIKE, num_local_experts=4,
)  # fmt: skip
of_transformers(
    "gpt_neox", "GPTNeoXForCausalLM", language,
    **{key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"},
)  # fmt: skip
of_transformers(
    "opt", "OPTForCausalLM", language,
    vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=32, word_embed_proj_dim=32, **SPECIAL,
)  # fmt: skip
of_transformers(
    "bloom", "BloomForCausalLM", language,
    vocab_size=VOCABULARY, hidden_size=32, n_layer=4, n_head=4, **SPECIAL,
)  # fmt: skip
of_transformers(
    "phi", "PhiForCausalLM", language,
    **{key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"},
)  # fmt: skip
of_transformers("bert", "BertForMaskedLM", masked_language, **BERT_LIKE)
of_transformers("roberta", "RobertaForSequenceClassification", sentences, **BERT_LIKE)
of_transformers(
    "distilbert", "DistilBertForSequenceClassification", sentences,
    vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=4, n_heads=4,
    max_position_embeddings=32, pad_token_id=0,
)  # fmt: skip
of_transformers("electra", "ElectraForMaskedLM", masked_language, **BERT_LIKE, embedding_size=32)
of_transformers(
    "t5", "T5ForConditionalGeneration", translation,
    vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
    decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
of_transformers(
    "bart", "BartForConditionalGeneration", translation,
    vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
    decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4,
    max_position_embeddings=32, decoder_start_token_id=2, forced_eos_token_id=2, **SPECIAL,
)  # fmt: skip
of_transformers(
    "whisper", "WhisperForConditionalGeneration", speech,
    vocab_size=VOCABULARY, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4,
    max_source_positions=20, max_target_positions=16, decoder_start_token_id=1, **SPECIAL,
)  # fmt: skip
of_transformers(
    "vit", "ViTForImageClassification", pictures,
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    image_size=32, patch_size=8, num_labels=2,
)  # fmt: skip
of_transformers(
    "mamba", "MambaForCausalLM", language,
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, state_size=8, **SPECIAL,
)  # fmt: skip
of_transformers(
    "clip_vision", "CLIPVisionModelWithProjection", pictures,
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    image_size=32, patch_size=8, projection_dim=16,
)  # fmt: skip


def embedding_loss(model: nn.Module, batch: Any) -> Tensor:
    """A regression on the embeddings of pictures: CLIP's vision tower has no loss of its own."""
    embeddings: Tensor = model(pixel_values=batch["pixel_values"]).image_embeds
    return functional.cross_entropy(embeddings, batch["labels"])


add(
    "clip_vision",
    "transformers",
    CASES["clip_vision"].recipe().model,
    pictures,
    embedding_loss,
    # Of 17 positions.
    tensor=('split.whole=["vision_model.embeddings.position_embedding"]',),
)


# -- torchvision and timm -------------------------------------------------------------------------


def classification(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def declare_torchvision_operators() -> None:
    """Let torchvision import where its compiled operators do not load.

    They do not where torchvision was built for another torch (the package index has only builds for
    CUDA): the models below use none of them.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    names = ("nms", "qnms", "roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
    for name in (*names, *(f"_{name}_backward" for name in names)):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor values) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []  # a library takes its definitions with it


# With batch normalisation a cell's plan sees the global batch at once, as the serial run does.
WHOLE_BATCH: Mapping[str, tuple[str, ...]] = {
    "data": ("norm=global",), "ZeRO": ("norm=global",), "stages": (f"microbatch={BATCH}",),
}  # fmt: skip


def of_torchvision(name: str, cells: Mapping[str, tuple[str, ...]], **settings: Any) -> None:
    def model() -> nn.Module:
        declare_torchvision_operators()
        models = importlib.import_module("torchvision.models")
        built: nn.Module = getattr(models, name)(num_classes=2, **settings)
        return built

    add(name, "torchvision", model, pictures, classification, **cells)


def of_timm(
    name: str, architecture: str, cells: Mapping[str, tuple[str, ...]], **settings: Any
) -> None:
    def model() -> nn.Module:
        declare_torchvision_operators()
        built: nn.Module = importlib.import_module("timm").create_model(
            architecture, num_classes=2, **settings
        )
        return built

    add(name, "timm", model, pictures, classification, **cells)


of_torchvision("resnet18", WHOLE_BATCH)
of_torchvision("mobilenet_v3_small", WHOLE_BATCH)
of_torchvision("squeezenet1_1", {})
of_torchvision("efficientnet_b0", WHOLE_BATCH)
of_timm(
    "vit_timm", "vit_tiny_patch16_224", {}, img_size=32, patch_size=8, embed_dim=32, depth=4,
    num_heads=4,
)  # fmt: skip
of_timm("mobilevit", "mobilevit_xxs", WHOLE_BATCH)
of_timm("convnext", "convnext_atto", {}, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32))
of_timm("regnet", "regnetx_002", WHOLE_BATCH)
of_timm(
    "swin", "swin_tiny_patch4_window7_224", {}, img_size=32, patch_size=2, window_size=4,
    embed_dim=16, depths=(2, 2), num_heads=(2, 4),
)  # fmt: skip
of_timm("densenet", "densenet121", WHOLE_BATCH, growth_rate=8, block_config=(2, 2, 2))


# -- own: as users write theirs -------------------------------------------------------------------


class Tagger(nn.Module):
    """A recurrent net over packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(
            output, batch_first=True, total_length=ids.shape[1]
        )
        tags: Tensor = self.head(padded)
        return tags


def tagging(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "ids": tokens(generator),
        "lengths": torch.randint(3, LENGTH + 1, (SAMPLES,), generator=generator),
        "tags": torch.randint(0, 5, (SAMPLES, LENGTH), generator=generator),
    }


def tagging_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    scores = model(batch["ids"], batch["lengths"])
    inside = torch.arange(LENGTH) < batch["lengths"][:, None]
    return functional.cross_entropy(
        scores[inside], batch["tags"][inside], reduction="sum"
    ), inside.sum()


add("packed_lstm", "own", Tagger, tagging, tagging_loss)  # type: ignore[arg-type]


class Forecaster(nn.Module):
    """Its own recurrence, step by step, with a state that it carries along."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRUCell(4, 24)
        self.second = nn.GRUCell(24, 24)
        self.head = nn.Linear(24, 4)

    def forward(self, series: Tensor) -> Tensor:
        a = series.new_zeros(len(series), 24)
        b = torch.zeros_like(a)
        steps = []
        for step in range(series.shape[1]):
            a = self.first(series[:, step], a)
            b = self.second(a, b)
            steps.append(self.head(b))
        return torch.stack(steps, dim=1)


def series(generator: torch.Generator) -> dict[str, Tensor]:
    return {"series": torch.randn(SAMPLES, 9, 4, generator=generator)}


def forecast_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch["series"][:, :-1]), batch["series"][:, 1:])


add("gru_cells", "own", Forecaster, series, forecast_loss)


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Down and up again, with skips."""

    def __init__(self, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(channels, 8), DoubleConv(8, 16)
        self.middle = DoubleConv(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.merge2, self.merge1 = DoubleConv(32, 16), DoubleConv(16, 8)
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        first = self.down1(pixels)
        second = self.down2(functional.max_pool2d(first, 2))
        x = self.middle(functional.max_pool2d(second, 2))
        x = self.merge2(torch.cat([second, self.up2(x)], dim=1))
        x = self.merge1(torch.cat([first, self.up1(x)], dim=1))
        scores: Tensor = self.head(x)
        return scores


def segmentation(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 2, (SAMPLES, 16, 16), generator=generator),
    }


add("unet", "own", UNet, segmentation, classification)


class Recommender(nn.Module):
    """DLRM: embeddings and dense features, pairwise products, a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50 + 10 * n, 8, mode="sum") for n in range(4))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x] + [table(categories[:, n]) for n, table in enumerate(self.tables)]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(5, 5, offset=-1)
        output: Tensor = self.top(torch.cat([x, products[:, rows, columns]], dim=1))
        return output.squeeze(1)


def clicks(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "dense": torch.randn(SAMPLES, 6, generator=generator),
        "categories": torch.randint(0, 50, (SAMPLES, 4, 3), generator=generator),
        "clicked": torch.randint(0, 2, (SAMPLES,), generator=generator),
    }


def click_loss(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["dense"], batch["categories"])
    return functional.binary_cross_entropy_with_logits(scores, batch["clicked"].to(scores.dtype))


add("dlrm", "own", Recommender, clicks, click_loss)


class Denoiser(nn.Module):
    """A diffusion model's net: it is told the time by a sinusoidal embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8))
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(DoubleConv(8, 8) for _ in range(3))
        self.leave = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, pixels: Tensor, times: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10_000) * torch.arange(8, device=times.device) / 8)
        angles = times[:, None].to(pixels.dtype) * frequencies
        embedding = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.enter(pixels)
        for block in self.blocks:
            x = x + block(x + embedding[:, :, None, None])
        noise: Tensor = self.leave(x)
        return noise


def noised(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixels": torch.randn(SAMPLES, 3, 8, 8, generator=generator),
        "noise": torch.randn(SAMPLES, 3, 8, 8, generator=generator),
        "times": torch.randint(0, 1000, (SAMPLES,), generator=generator),
    }


def diffusion_loss(model: nn.Module, batch: Any) -> Tensor:
    kept = torch.cos(batch["times"] / 1000 * math.pi / 2).to(batch["pixels"].dtype)[
        :, None, None, None
    ]
    noisy = kept * batch["pixels"] + (1 - kept**2).sqrt() * batch["noise"]
    return functional.mse_loss(model(noisy, batch["times"]), batch["noise"])


add("diffusion", "own", Denoiser, noised, diffusion_loss)


class Experts(nn.Module):
    """A mixture of experts whose router sends each token to the two best."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(dim=-1).topk(2, dim=-1)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            if len(token):
                output.index_add_(0, token, weights[token, rank, None] * expert(flat[token]))
        return output.reshape(x.shape)


class ExpertModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        scores: Tensor = self.head(x)
        return scores


def next_token_loss(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["input_ids"])
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


add("experts", "own", ExpertModel, language, next_token_loss)


class Encoder(nn.Module):
    """torch's own transformer layers, with a mask for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0)
        scores: Tensor = self.head(x)
        return scores


add("torch_encoder", "own", Encoder, language, next_token_loss)


class Autoencoder(nn.Module):
    """A variational autoencoder: it draws in its forward, and returns three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 192))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(pixels)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(drawn).view_as(pixels), mean, log_variance


def autoencoder_loss(model: nn.Module, batch: Any) -> Tensor:
    picture, mean, log_variance = model(batch["pixels"])
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(dim=1).mean()
    return functional.mse_loss(picture, batch["pixels"]) + 0.01 * divergence


add("vae", "own", Autoencoder, noised, autoencoder_loss)


class GraphNet(nn.Module):
    """Messages between the nodes of small graphs, whose neighbours are a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        degree = neighbours.sum(dim=-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            nodes = torch.relu(layer(neighbours @ nodes / degree)) + nodes
        energy: Tensor = self.head(nodes.mean(dim=1))
        return energy.squeeze(-1)


def molecules(generator: torch.Generator) -> dict[str, Tensor]:
    edges = torch.rand(SAMPLES, 6, 6, generator=generator) < 0.4
    return {
        "nodes": torch.randn(SAMPLES, 6, 8, generator=generator),
        "neighbours": edges.float(),
        "energy": torch.randn(SAMPLES, generator=generator),
    }


def energy_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch["nodes"], batch["neighbours"]), batch["energy"])


add("graph_net", "own", GraphNet, molecules, energy_loss, tensor=('split.whole=["head"]',))


class WaveNet(nn.Module):
    """Dilated causal convolutions with weight norm, gates and a sum of skips."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.enter = nn.Conv1d(4, 16, 1)
        self.filters = nn.ModuleList(norm(nn.Conv1d(16, 32, 2, dilation=2**n)) for n in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3))
        self.leave = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 4, 1))

    def forward(self, series: Tensor) -> Tensor:
        x = self.enter(series.transpose(1, 2))
        total = torch.zeros_like(x)
        for number, (gate, skip) in enumerate(zip(self.filters, self.skips, strict=True)):
            a, b = gate(functional.pad(x, (2**number, 0))).chunk(2, dim=1)
            y = a.tanh() * b.sigmoid()
            total = total + skip(y)
            x = x + y
        output: Tensor = self.leave(total)
        return output.transpose(1, 2)


add("wavenet", "own", WaveNet, series, forecast_loss)
