"""A Hugging Face module with LoRA adapters, tiny and made at random: only the adapters are trained, stacked and sent."""

import pytest
import torch
from torch.nn import functional as F

import fedda
from conftest import close

WHY = "the Hugging Face test needs transformers and peft (170 MB), which the development environment does not install"
transformers = pytest.importorskip("transformers", reason=WHY)
peft = pytest.importorskip("peft", reason=WHY)

torch.manual_seed(0)
IDS = torch.randint(0, 30, (40, 6))
MASK = (torch.arange(6) < torch.randint(3, 7, (40, 1))).long()
LABELS = IDS[:, 0] % 2


def bert():
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(1)
    network = transformers.BertForSequenceClassification(config)
    return peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))


def gpt():
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=8, n_layer=2, n_head=2, n_positions=8, attn_implementation="eager", use_cache=False
    )
    torch.manual_seed(1)
    network = transformers.GPT2LMHeadModel(config)
    return peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def next_token(output, ids):
    return F.cross_entropy(output.logits[:, :-1].transpose(1, 2), ids[:, 1:])


def of_class(output, y):
    return F.cross_entropy(output.logits, y)


# BERT reads a mask [n, length], which vmap forbids; it adds one of four axes to its scores.
ADDED = torch.where(MASK[:, None, None].bool(), 0.0, -1e9)


@pytest.mark.filterwarnings("error:vmap cannot take this model")
@pytest.mark.parametrize("make, loss, mask, y", [(bert, of_class, ADDED, LABELS), (gpt, next_token, MASK, IDS)])
def test_adapters_train_as_they_are(make, loss, mask, y):
    network = make().double()
    x = {"input_ids": IDS, "attention_mask": mask}
    test = {name: value[32:] for name, value in x.items()}
    problem = fedda.problem(
        network, loss, x={k: v[:32] for k, v in x.items()}, y=y[:32], client=torch.arange(32) % 4, batch=4,
        test=(test, y[32:]),
    )  # fmt: skip
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert {name for name, _ in problem.layout} == trained and any("lora" in name for name in trained)
    assert problem.d < sum(p.numel() for p in network.parameters()) / 2
    algorithm = fedda.make("fedda-mvr", lr=0.5, w=8.0, eps=0.5, steps=2)
    ends = [fedda.train(algorithm, problem, rounds=2, engine=e, every=2) for e in ("sequential", "vectorised")]
    close(ends[0].x, ends[1].x, 1e-12)
    model = ends[1].model()
    test = {name: v.double() if v.is_floating_point() else v for name, v in test.items()}
    assert float(loss(model(**test), y[32:])) == pytest.approx(ends[1].history[-1]["test_loss"], rel=1e-12)
    state = ends[1].state_dict()
    assert set(state) == set(network.state_dict())
    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, state[name])}
    assert moved == trained
