"""Models for sequences of tokens: each position predicts the next token."""

from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import count
from ..registry import models
from .models import Model, cross_entropy


class Lstm(nn.Module):
    """Embedding, LSTM layers, and a linear map to the next token at every position."""

    def __init__(self, classes: int, width: int, layers: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.out = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(self.embedding(tokens))[0])
        return logits


class Gru(nn.Module):
    """Embedding, GRU layers, and a linear map to the next token at every position."""

    def __init__(self, classes: int, width: int, layers: int, embedding: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.gru = nn.GRU(embedding, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.out = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.gru(self.embedding(tokens))[0])
        return logits


class Block(nn.Module):
    """Causal self-attention and a perceptron, each after a LayerNorm and added to its input (Vaswani et al. 2017)."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.dropout(self.attention(self.norm_attention(h)))
        out: Tensor = h + self.dropout(self.mlp(self.norm_mlp(h)))
        return out

    def attention(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        q, k, v = self.qkv(h).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.project(h.transpose(1, 2).reshape(batch, length, width))
        return out


class Transformer(nn.Module):
    """Embeddings of tokens and positions, blocks, and a linear map to the next token at every position."""

    def __init__(self, length: int, classes: int, width: int, layers: int, heads: int, dropout: float):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(classes, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens) + self.positions.weight[: tokens.shape[-1]]
        logits: Tensor = self.out(self.norm(self.blocks(h)))
        return logits


@models.register("lstm")
def lstm(shape: tuple[int, ...], classes: int, width: int = 128, layers: int = 2, dropout: float = 0.0) -> Model:
    """An LSTM that predicts the next token at every position of a sequence.

    Args:
        shape: the shape of a sample, [positions].
        classes: how many tokens there are.
        width: of the embedding and of each layer.
        layers: how many.
        dropout: the share of activations that is dropped between layers.
    """
    _length("lstm", shape)
    count("lstm", "width", width)
    count("lstm", "layers", layers)
    return Lstm(classes, width, layers, dropout), cross_entropy


@models.register("gru")
def gru(
    shape: tuple[int, ...], classes: int, width: int = 128, layers: int = 2, embedding: int = 32, dropout: float = 0.0
) -> Model:
    """A GRU that predicts the next token at every position of a sequence.

    Args:
        shape: the shape of a sample, [positions].
        classes: how many tokens there are.
        width: of each layer.
        layers: how many.
        embedding: the width of the embedding.
        dropout: the share of activations that is dropped between layers.
    """
    _length("gru", shape)
    for name, value in (("width", width), ("layers", layers), ("embedding", embedding)):
        count("gru", name, value)
    return Gru(classes, width, layers, embedding, dropout), cross_entropy


@models.register("transformer")
def transformer(
    shape: tuple[int, ...], classes: int, width: int = 96, layers: int = 2, heads: int = 4, dropout: float = 0.0
) -> Model:
    """A causal transformer that predicts the next token at every position of a sequence.

    Args:
        shape: the shape of a sample, [positions].
        classes: how many tokens there are.
        width: of the embedding and of each layer.
        layers: how many.
        heads: of the attention; they divide the width.
        dropout: the share of activations that is dropped.
    """
    length = _length("transformer", shape)
    for name, value in (("width", width), ("layers", layers), ("heads", heads)):
        count("transformer", name, value)
    if width % heads:
        raise ValueError(f"transformer: width must be a multiple of heads, got {width} and {heads}")
    return Transformer(length, classes, width, layers, heads, dropout), cross_entropy


def _length(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) != 1:
        raise ValueError(f"{name}: the data must be sequences of tokens [length], got samples of shape {list(shape)}")
    return shape[0]
