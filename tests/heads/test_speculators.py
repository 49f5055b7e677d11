"""Converted heads in the code of `vllm-project/speculators` itself; skipped where it is absent."""

import os

import numpy as np
import pytest

from specjax.checkpoints import save_draft_head
from specjax.checkpoints.heads import load_draft_head
from tests.heads.test_fixtures import CASES, G, fixture, golden_of, verifier

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
torch = pytest.importorskip("torch")
speculators = pytest.importorskip("speculators")


def tensor(x):
    return torch.from_numpy(np.asarray(x))[None]


def zeros(rows, width, known):
    """`known` with rows of zeros after it, which nobody may read."""
    return tensor(np.concatenate([known, np.zeros((rows - len(known), width), np.float32)]))


def recurrent(model, golden, anchor, drafts):
    """Logits of all steps after an anchor, by the pass of training with the prescribed tokens."""
    tokens, features = golden["tokens"], golden["features"][:anchor]
    ids = tensor(np.concatenate([tokens[1 : anchor + 1], drafts[:-1]]).astype(np.int64))
    rows, found = ids.shape[1], []
    hook = model.lm_head.register_forward_hook(
        lambda _, given, out: found.append(out[0, anchor - 1].numpy())
    )
    states = zeros(rows, features.shape[1], features)
    model(states, ids, torch.zeros_like(ids), ttt_steps=G)
    hook.remove()
    return np.stack(found)


def multi_token(model, golden, anchor, drafts):
    """The same of an MTP, whose pass of training has constant positions: by its layer."""
    tokens, states = golden["tokens"], tensor(golden["features"][:anchor])
    ids = tensor(np.concatenate([tokens[1 : anchor + 1], drafts[:-1]]).astype(np.int64))
    found = []
    for rows in range(anchor, anchor + G):
        places = torch.arange(rows)[None]
        out = model.mtp_layers[0](
            hidden_states=states,
            token_embeddings=model.embed_tokens(ids[:, :rows]),
            attention_mask=torch.full((rows, rows), -torch.inf).triu(1)[None, None],
            position_ids=places,
            position_embeddings=model.rotary_emb(states, places),
        )
        found.append(model.lm_head(out)[0, -1].numpy())
        states = torch.cat([states, out[:, -1:]], dim=1)
    return np.stack(found)


def block(model, golden, anchor, drafts):
    tokens, features, size = golden["tokens"], golden["features"][:anchor], model.block_size
    rows = anchor + 2 * size + 2
    ids = zeros(rows, 1, tokens[: anchor + 1, None])[..., 0].long()
    at_anchor = torch.zeros(1, rows)
    at_anchor[0, anchor] = 1
    states, last = zeros(rows, features.shape[1], features), torch.zeros(1, rows, 32)
    hidden, logits, *_ = model._backbone_forward(
        states, ids, at_anchor, last, torch.zeros_like(ids), max_anchors=1
    )
    hidden, logits = hidden.view(1, size, -1), logits.view(1, size, -1)
    before = tensor(np.concatenate([tokens[anchor : anchor + 1], drafts[:-1]]).astype(np.int64))
    if hasattr(model, "markov_head"):
        logits = logits + model.markov_head.block_bias(
            prev_token_ids=before,
            hidden_states=hidden,
            prev_emb=model.markov_head.prev_embeddings(before),
        )
    logits = logits[:, size - G :]
    if hasattr(model, "candidate_selector"):
        ids, scores = model.candidate_selector.select(logits, hidden[:, size - G :], before)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)
    return logits[0].numpy()


@pytest.mark.parametrize("name", CASES)
def test_a_converted_head_has_the_logits_of_its_project(name, tmp_path):
    of, golden = verifier(CASES[name]), golden_of(name, "rounds")
    head, params = load_draft_head(fixture(name, "head"), of.model)
    source = {"verifier_params": of.params, "verifier_name": str(of.path)}
    save_draft_head(tmp_path / "head", head, params, portable=True, **source)
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path / "head")
    kind = config.speculators_model_type
    config.transformer_layer_config._attn_implementation = "sdpa" if kind == "mtp" else "eager"
    model = speculators.SpeculatorModel.from_pretrained(tmp_path / "head", config=config)
    logits = {"eagle3": recurrent, "mtp": multi_token}.get(kind, block)
    with torch.no_grad():
        for i, anchor in enumerate(golden["anchor_pos"].tolist()):
            found = logits(model.eval().float(), golden, anchor, golden["drafts"][i])
            np.testing.assert_allclose(found, golden["draft_logits"][i], atol=1e-5)
