"""The families of models of Hugging Face's transformers, as tables: names of tensors, leaves, and layouts.

A line of a table is a tensor's name, the path of its leaf, a layout in einops notation (one side alone if nothing
moves) and a condition:

    .self_attn.{q,k,v}_proj.bias    attn/{q,k,v}/bias    (h d) -> h d    if qkv_bias or attention_bias

- A name that starts with "." belongs to a layer, and its leaf is below "layers/{i}". A name that starts with "/" is
  complete, and so is its leaf. All others are below the prefixes of the tower.
- {q,k,v} writes three lines. In a leaf, [q,k,v] names the three parts of one tensor: the indices of the axis n.
- Leaves below "moe/" belong to the layers with experts, and leaves below "mlp/" to the other ones.
- The condition has names of settings in config.json. "if stored" is for tensors that a folder may lack, and "if copy"
  for tensors that repeat the leaf; settings may follow.
- Of several lines for a leaf, the first whose tensor the folder has is used: versions of transformers, and classes of
  models, give tensors different names. Without tensors, it is the first.

It is long because each family has its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A model, or the part of a model that has layers of its own."""

    table: str

    prefixes: Sequence[str] = ("model.", "", "language_model.model.", "model.language_model.", "transformer.")
    """What its tensors' names may begin with. The first line of the table shows which of these a folder has."""

    layers: str = "layers.{i}"
    """The start of the names of a layer's tensors, below the prefix."""

    target: str = ""
    """The start of the paths of its leaves."""

    config: str = ""
    """The name of its settings in config.json; "" if these are all settings."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings that config.json may omit."""

    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of settings in config.json. Of several, the first that it has is used."""

    has_given_heads: bool = False
    """Whether the number of heads, and not their size, determines the layouts with heads."""

    def config_in(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Its settings, under the names of Llama's. Raises KeyError if one is missing."""
        own = {**self.settings, **(config[self.config] if self.config else config)}
        for ours, theirs in self.keys.items():
            names = theirs.split()
            own[ours] = own[next((name for name in names if own.get(name) is not None), names[-1])]
        if "tie_word_embeddings" in config:  # transformers asks the whole model, not its part
            own["tie_word_embeddings"] = config["tie_word_embeddings"]
        return own


_TASKS = """
/score.weight                     score/kernel              c m -> m c              if stored
/score.bias                       score/bias                c                       if stored
/classifier.weight                classifier/kernel         c m -> m c              if stored
/classifier.bias                  classifier/bias           c                       if stored
/qa_outputs.weight                qa_outputs/kernel         c m -> m c              if stored
/qa_outputs.bias                  qa_outputs/bias           c                       if stored
"""

_MODEL = (
    """
embed_tokens.weight               embed/embedding
norm.weight                       norm/scale
/lm_head.weight                   head/kernel               v m -> m v              if !tie_word_embeddings
/language_model.lm_head.weight    head/kernel               v m -> m v              if !tie_word_embeddings
"""
    + _TASKS
)

_ATTENTION = """
.self_attn.{q,k,v}_proj.weight    attn/{q,k,v}/kernel       (h d) m -> m h d
.self_attn.{q,k,v}_proj.bias      attn/{q,k,v}/bias         (h d) -> h d            if qkv_bias or attention_bias
.self_attn.o_proj.weight          attn/o/kernel             m (h d) -> h d m
.self_attn.o_proj.bias            attn/o/bias               m                       if attention_bias
"""

_HEAD_NORMS = """
.self_attn.{q,k}_norm.weight      attn/{q,k}_norm/scale     d
"""

_MLP = """
.mlp.{gate,up}_proj.weight        mlp/{gate,up}/kernel      f m -> m f
.mlp.down_proj.weight             mlp/down/kernel           m f -> f m
.mlp.{gate,up,down}_proj.bias     mlp/{gate,up,down}/bias   f                       if mlp_bias
"""

_NORMS = """
.input_layernorm.weight           attn_norm/scale           m
.post_attention_layernorm.weight  mlp_norm/scale            m
"""

_LLAMA = _MODEL + _ATTENTION + _MLP + _NORMS

_EXPERTS = """
.mlp.gate.weight                              moe/router/kernel            e m -> m e
.mlp.experts.{e}.{gate,up}_proj.weight        moe/{gate,up}/kernel         f m -> e m f
.mlp.experts.{e}.down_proj.weight             moe/down/kernel              m f -> e f m
.mlp.experts.gate_up_proj                     moe/[gate,up]/kernel         e (n f) m -> e m f
.mlp.experts.down_proj                        moe/down/kernel              e m f -> e f m
"""

_QWEN2_MOE = """
.mlp.shared_expert.{gate,up}_proj.weight      moe/shared/{gate,up}/kernel  f m -> m f
.mlp.shared_expert.down_proj.weight           moe/shared/down/kernel       m f -> f m
.mlp.shared_expert_gate.weight                moe/shared_gate/kernel       g m -> m g
"""

_MIXTRAL = """
.block_sparse_moe.gate.weight                 moe/router/kernel            e m -> m e
.block_sparse_moe.experts.{e}.{w1,w3}.weight  moe/{gate,up}/kernel         f m -> e m f
.block_sparse_moe.experts.{e}.w2.weight       moe/down/kernel              m f -> e f m
"""

_GPT_OSS = """
.self_attn.sinks                      attn/sinks           h
.mlp.router.weight                    moe/router/kernel    e m -> m e
.mlp.router.bias                      moe/router/bias      e
.mlp.experts.gate_up_proj             moe/gate_up/kernel   e m (f two) -> e m f two        if !mxfp4
.mlp.experts.gate_up_proj_blocks      moe/gate_up/kernel   e (f two) b k -> e (b k) f two  if mxfp4
.mlp.experts.gate_up_proj_bias        moe/gate_up/bias     e (f two) -> e f two
.mlp.experts.down_proj                moe/down/kernel      e f m                           if !mxfp4
.mlp.experts.down_proj_blocks         moe/down/kernel      e m b k -> e (b k) m            if mxfp4
.mlp.experts.down_proj_bias           moe/down/bias        e m
"""

_DEEPSEEK = """
.self_attn.q_proj.weight                       attn/q/kernel                (h d) m -> m h d     if !q_lora_rank
.self_attn.q_a_proj.weight                     attn/q_a/kernel              r m -> m r           if q_lora_rank
.self_attn.q_a_proj.bias                       attn/q_a/bias                r       if attention_bias and q_lora_rank
.self_attn.q_a_layernorm.weight                attn/q_a_norm/scale          r                    if q_lora_rank
.self_attn.q_b_proj.weight                     attn/q_b/kernel              (h d) r -> r h d     if q_lora_rank
.self_attn.kv_a_proj_with_mqa.weight           attn/kv_a/kernel             r m -> m r
.self_attn.kv_a_proj_with_mqa.bias             attn/kv_a/bias               r                    if attention_bias
.self_attn.kv_a_layernorm.weight               attn/kv_a_norm/scale         r
.self_attn.kv_b_proj.weight                    attn/kv_b/kernel             (h d) r -> r h d
.self_attn.o_proj.weight                       attn/o/kernel                m (h d) -> h d m
.self_attn.o_proj.bias                         attn/o/bias                  m                    if attention_bias
.mlp.gate.e_score_correction_bias              moe/router/correction        e
.mlp.shared_experts.{gate,up}_proj.weight      moe/shared/{gate,up}/kernel  f m -> m f           if n_shared_experts
.mlp.shared_experts.down_proj.weight           moe/shared/down/kernel       m f -> f m           if n_shared_experts
"""

_LLAMA4 = """
.feed_forward.{gate,up}_proj.weight                mlp/{gate,up}/kernel         f m -> m f
.feed_forward.down_proj.weight                     mlp/down/kernel              m f -> f m
.feed_forward.router.weight                        moe/router/kernel            e m -> m e
.feed_forward.experts.gate_up_proj                 moe/gate_up/kernel           e m (two f) -> e m two f
.feed_forward.experts.down_proj                    moe/down/kernel              e f m
.feed_forward.shared_expert.{gate,up}_proj.weight  moe/shared/{gate,up}/kernel  f m -> m f
.feed_forward.shared_expert.down_proj.weight       moe/shared/down/kernel       m f -> f m
"""

_PHI3 = """
.self_attn.qkv_proj.weight    attn/[q,k,v]/kernel   (h d) m -> m h d
.self_attn.o_proj.weight      attn/o/kernel         m (h d) -> h d m
.mlp.gate_up_proj.weight      mlp/[gate,up]/kernel  (n f) m -> m f
.mlp.down_proj.weight         mlp/down/kernel       m f -> f m
"""

_OLMO2 = """
.self_attn.{q,k}_norm.weight        attn/{q,k}_norm/scale   (h d) -> h d
.post_attention_layernorm.weight    post_attn_norm/scale    m
.post_feedforward_layernorm.weight  post_mlp_norm/scale     m
"""

_GEMMA2_NORMS = """
.input_layernorm.weight             attn_norm/scale       m
.post_attention_layernorm.weight    post_attn_norm/scale  m
.pre_feedforward_layernorm.weight   mlp_norm/scale        m
.post_feedforward_layernorm.weight  post_mlp_norm/scale   m
"""

_GPT2 = """
wte.weight              embed/embedding
wpe.weight              positions/embedding
ln_f.{weight,bias}      norm/{scale,bias}
/lm_head.weight         head/kernel                v m -> m v          if !tie_word_embeddings
.attn.c_attn.weight     attn/[q,k,v]/kernel        m (n h d) -> m h d
.attn.c_attn.bias       attn/[q,k,v]/bias          (n h d) -> h d
.attn.c_proj.weight     attn/o/kernel              (h d) m -> h d m
.attn.c_proj.bias       attn/o/bias                m
.ln_1.{weight,bias}     attn_norm/{scale,bias}     m
.ln_2.{weight,bias}     mlp_norm/{scale,bias}      m
.mlp.c_fc.weight        mlp/up/kernel              m f
.mlp.c_fc.bias          mlp/up/bias                f
.mlp.c_proj.weight      mlp/down/kernel            f m
.mlp.c_proj.bias        mlp/down/bias              m
"""

_GPT_NEOX = """
embed_in.weight                             embed/embedding
final_layer_norm.{weight,bias}              norm/{scale,bias}
/embed_out.weight                           head/kernel             v m -> m v          if !tie_word_embeddings
/lm_head.weight                             head/kernel             v m -> m v          if !tie_word_embeddings
.attention.query_key_value.weight           attn/[q,k,v]/kernel     (h n d) m -> m h d
.attention.query_key_value.bias             attn/[q,k,v]/bias       (h n d) -> h d      if attention_bias
.attention.dense.weight                     attn/o/kernel           m (h d) -> h d m
.attention.dense.bias                       attn/o/bias             m                   if attention_bias
.input_layernorm.{weight,bias}              attn_norm/{scale,bias}  m
.post_attention_layernorm.{weight,bias}     mlp_norm/{scale,bias}   m
.mlp.dense_h_to_4h.weight                   mlp/up/kernel           f m -> m f
.mlp.dense_h_to_4h.bias                     mlp/up/bias             f
.mlp.dense_4h_to_h.weight                   mlp/down/kernel         m f -> f m
.mlp.dense_4h_to_h.bias                     mlp/down/bias           m
"""


_BERT = """
embeddings.word_embeddings.weight                     embed/embedding
embeddings.position_embeddings.weight                 positions/embedding
embeddings.token_type_embeddings.weight               token_types/embedding
embeddings.LayerNorm.{weight,bias}                    embed_norm/{scale,bias}
embeddings.LayerNorm.{gamma,beta}                     embed_norm/{scale,bias}
.attention.self.{query,key,value}.weight              attn/{q,k,v}/kernel      (h d) m -> m h d
.attention.self.{query,key,value}.bias                attn/{q,k,v}/bias        (h d) -> h d
.attention.output.dense.weight                        attn/o/kernel            m (h d) -> h d m
.attention.output.dense.bias                          attn/o/bias              m
.attention.output.LayerNorm.{weight,bias}             attn_norm/{scale,bias}   m
.attention.output.LayerNorm.{gamma,beta}              attn_norm/{scale,bias}   m
.intermediate.dense.weight                            mlp/up/kernel            f m -> m f
.intermediate.dense.bias                              mlp/up/bias              f
.output.dense.weight                                  mlp/down/kernel          m f -> f m
.output.dense.bias                                    mlp/down/bias            m
.output.LayerNorm.{weight,bias}                       mlp_norm/{scale,bias}    m
.output.LayerNorm.{gamma,beta}                        mlp_norm/{scale,bias}    m
pooler.dense.weight                                   pooler/kernel            p m -> m p    if stored
pooler.dense.bias                                     pooler/bias              p             if stored
"""

_BERT_HEAD = """
/cls.predictions.transform.dense.weight               head/dense/kernel        p m -> m p    if stored
/cls.predictions.transform.dense.bias                 head/dense/bias          p             if stored
/cls.predictions.transform.LayerNorm.{weight,bias}    head/norm/{scale,bias}   m             if stored
/cls.predictions.transform.LayerNorm.{gamma,beta}     head/norm/{scale,bias}   m             if stored
/cls.predictions.bias                                 head/bias                v             if stored
/cls.predictions.decoder.weight                       head/kernel              v m -> m v    if !tie_word_embeddings
/cls.predictions.decoder.bias                         head/bias                              if copy
/cls.seq_relationship.weight                          next_sentence/kernel     c m -> m c    if stored
/cls.seq_relationship.bias                            next_sentence/bias       c             if stored
"""

_ROBERTA_HEAD = """
/lm_head.dense.weight                                 head/dense/kernel        p m -> m p    if stored
/lm_head.dense.bias                                   head/dense/bias          p             if stored
/lm_head.layer_norm.{weight,bias}                     head/norm/{scale,bias}   m             if stored
/lm_head.bias                                         head/bias                v             if stored
/lm_head.decoder.weight                               head/kernel              v m -> m v    if !tie_word_embeddings
/lm_head.decoder.bias                                 head/bias                              if copy
/classifier.dense.weight                              classifier/dense/kernel  p m -> m p    if stored
/classifier.dense.bias                                classifier/dense/bias    p             if stored
/classifier.out_proj.weight                           classifier/kernel        c m -> m c    if stored
/classifier.out_proj.bias                             classifier/bias          c             if stored
"""

_CLIP_LAYERS = """
.self_attn.{q,k,v}_proj.weight    attn/{q,k,v}/kernel     (h d) m -> m h d
.self_attn.{q,k,v}_proj.bias      attn/{q,k,v}/bias       (h d) -> h d
.self_attn.out_proj.weight        attn/o/kernel           m (h d) -> h d m
.self_attn.out_proj.bias          attn/o/bias             m
.layer_norm1.{weight,bias}        attn_norm/{scale,bias}  m
.layer_norm2.{weight,bias}        mlp_norm/{scale,bias}   m
.mlp.fc1.weight                   mlp/up/kernel           f m -> m f
.mlp.fc1.bias                     mlp/up/bias             f
.mlp.fc2.weight                   mlp/down/kernel         m f -> f m
.mlp.fc2.bias                     mlp/down/bias           m
"""

_CLIP_VISION = """
embeddings.patch_embedding.weight     patches/kernel           m c y x -> y x c m
embeddings.patch_embedding.bias       patches/bias             m                   if stored
embeddings.class_embedding            class/embedding          m                   if stored
embeddings.position_embedding.weight  positions/embedding
pre_layrnorm.{weight,bias}            pre_norm/{scale,bias}    m                   if stored
post_layernorm.{weight,bias}          norm/{scale,bias}
head.probe                            pool/probe                                   if stored
head.attention.in_proj_weight         pool/attn/[q,k,v]/kernel (n h d) m -> m h d  if stored
head.attention.in_proj_bias           pool/attn/[q,k,v]/bias   (n h d) -> h d      if stored
head.attention.out_proj.weight        pool/attn/o/kernel       m (h d) -> h d m    if stored
head.attention.out_proj.bias          pool/attn/o/bias         m                   if stored
head.layernorm.{weight,bias}          pool/norm/{scale,bias}   m                   if stored
head.mlp.fc1.weight                   pool/mlp/up/kernel       f m -> m f          if stored
head.mlp.fc1.bias                     pool/mlp/up/bias         f                   if stored
head.mlp.fc2.weight                   pool/mlp/down/kernel     m f -> f m          if stored
head.mlp.fc2.bias                     pool/mlp/down/bias       m                   if stored
/visual_projection.weight             vision/projection/kernel p m -> m p          if stored
/logit_scale                          logits/scale                                 if stored
/logit_bias                           logits/bias                                  if stored
"""

_CLIP_TEXT = """
embeddings.token_embedding.weight     embed/embedding
embeddings.position_embedding.weight  positions/embedding
final_layer_norm.{weight,bias}        norm/{scale,bias}
head.weight                           projection/kernel        p m -> m p          if stored
head.bias                             projection/bias          p                   if stored
/text_projection.weight               text/projection/kernel   p m -> m p          if stored
"""

_GEMMA3_PROJECTOR = """
/multi_modal_projector.mm_input_projection_weight        projector/kernel
/multi_modal_projector.mm_soft_emb_norm.weight           projector/norm/weight
/model.multi_modal_projector.mm_input_projection_weight  projector/kernel
/model.multi_modal_projector.mm_soft_emb_norm.weight     projector/norm/weight
"""

_LLAMA4_VISION = """
class_embedding                           class/embedding
positional_embedding_vlm                  positions/embedding
patch_embedding.linear.weight             patches/kernel           m p -> p m
layernorm_pre.{weight,bias}               pre_norm/{scale,bias}
layernorm_post.{weight,bias}              norm/{scale,bias}
vision_adapter.mlp.fc1.weight             adapter/up/kernel        f m -> m f
vision_adapter.mlp.fc2.weight             adapter/down/kernel      m f -> f m
/multi_modal_projector.linear_1.weight    projector/kernel         f m -> m f
.self_attn.{q,k,v}_proj.weight            attn/{q,k,v}/kernel      (h d) m -> m h d
.self_attn.{q,k,v}_proj.bias              attn/{q,k,v}/bias        (h d) -> h d
.self_attn.o_proj.weight                  attn/o/kernel            m (h d) -> h d m
.self_attn.o_proj.bias                    attn/o/bias              m
.input_layernorm.{weight,bias}            attn_norm/{scale,bias}   m
.post_attention_layernorm.{weight,bias}   mlp_norm/{scale,bias}    m
.mlp.fc1.weight                           mlp/up/kernel            f m -> m f
.mlp.fc1.bias                             mlp/up/bias              f
.mlp.fc2.weight                           mlp/down/kernel          m f -> f m
.mlp.fc2.bias                             mlp/down/bias            m
"""

_T5_ENCODER = """
final_layer_norm.weight                                        norm/scale
/shared.weight                                                 embed/embedding
/encoder.embed_tokens.weight                                   embed/embedding         if copy
/decoder.embed_tokens.weight                                   embed/embedding         if copy
/lm_head.weight    embed/embedding    if copy and tie_word_embeddings and scale_decoder_outputs
block.0.layer.0.SelfAttention.relative_attention_bias.weight   relative/embedding
.layer.0.SelfAttention.{q,k,v}.weight                          attn/{q,k,v}/kernel     (h d) m -> m h d
.layer.0.SelfAttention.o.weight                                attn/o/kernel           m (h d) -> h d m
.layer.0.layer_norm.weight                                     attn_norm/scale         m
.layer.1.DenseReluDense.wi.weight                              mlp/up/kernel           f m -> m f
.layer.1.DenseReluDense.wi_1.weight                            mlp/up/kernel           f m -> m f
.layer.1.DenseReluDense.wi_0.weight                            mlp/gate/kernel         f m -> m f          if stored
.layer.1.DenseReluDense.wo.weight                              mlp/down/kernel         m f -> f m
.layer.1.layer_norm.weight                                     mlp_norm/scale          m
"""

_T5_DECODER = (
    "\n".join(line.replace(".layer.1.", ".layer.2.") for line in _T5_ENCODER.splitlines() if not line.startswith("/"))
    + """
/lm_head.weight    head/kernel    v m -> m v    if !tie_word_embeddings or !scale_decoder_outputs and stored
.layer.1.EncDecAttention.{q,k,v}.weight                        cross/{q,k,v}/kernel    (h d) m -> m h d
.layer.1.EncDecAttention.o.weight                              cross/o/kernel          m (h d) -> h d m
.layer.1.layer_norm.weight                                     cross_norm/scale        m
"""
)

_WHISPER_LAYERS = """
embed_positions.weight                      positions/embedding
layer_norm.{weight,bias}                    norm/{scale,bias}
.self_attn.{q,k,v}_proj.weight              attn/{q,k,v}/kernel      (h d) m -> m h d
.self_attn.{q,v}_proj.bias                  attn/{q,v}/bias          (h d) -> h d
.self_attn.out_proj.weight                  attn/o/kernel            m (h d) -> h d m
.self_attn.out_proj.bias                    attn/o/bias              m
.self_attn_layer_norm.{weight,bias}         attn_norm/{scale,bias}   m
.fc1.weight                                 mlp/up/kernel            f m -> m f
.fc1.bias                                   mlp/up/bias              f
.fc2.weight                                 mlp/down/kernel          m f -> f m
.fc2.bias                                   mlp/down/bias            m
.final_layer_norm.{weight,bias}             mlp_norm/{scale,bias}    m
"""

_WHISPER_ENCODER = (
    _WHISPER_LAYERS
    + """
conv1.weight                                conv1/kernel             m c k -> k c m
conv1.bias                                  conv1/bias
conv2.weight                                conv2/kernel             m c k -> k c m
conv2.bias                                  conv2/bias
/projector.weight                           projector/kernel         p m -> m p        if stored
/projector.bias                             projector/bias           p                 if stored
/layer_weights                              layer_weights                              if stored
"""
    + _TASKS
)

_WHISPER_DECODER = (
    _WHISPER_LAYERS
    + """
embed_tokens.weight                         embed/embedding
/proj_out.weight                            head/kernel              v m -> m v        if !tie_word_embeddings
.encoder_attn.{q,k,v}_proj.weight           cross/{q,k,v}/kernel     (h d) m -> m h d
.encoder_attn.{q,v}_proj.bias               cross/{q,v}/bias         (h d) -> h d
.encoder_attn.out_proj.weight               cross/o/kernel           m (h d) -> h d m
.encoder_attn.out_proj.bias                 cross/o/bias             m
.encoder_attn_layer_norm.{weight,bias}      cross_norm/{scale,bias}  m
"""
)


def _gemma(table: str) -> str:
    """Gemma's norms multiply by 1 + weight. The leaf has the weight, so that no bit is lost, and another name."""
    return table.replace("/scale", "/weight")


_TIED: Mapping[str, Any] = {"tie_word_embeddings": True}

_LLAMA4_TEXT = Tower(table=_MODEL + _ATTENTION + _LLAMA4 + _NORMS)
_GEMMA3_TEXT = Tower(
    table=_gemma(_MODEL + _ATTENTION + _HEAD_NORMS + _MLP + _GEMMA2_NORMS),
    settings={**_TIED, "num_attention_heads": 8, "head_dim": 256},
)
_GPT_OSS_TOWER = Tower(table=_MODEL + _ATTENTION + _GPT_OSS + _NORMS, settings={"attention_bias": True})

_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers")


def _clip(table: str, part: str, *sizes: int) -> Tower:
    """The text or vision tower of CLIP and SigLIP, with the sizes that config.json may omit."""
    return Tower(
        table=table + _CLIP_LAYERS,
        prefixes=(f"{part}_model.", f"{part}_tower.{part}_model.", f"{part}_tower.", f"model.{part}_tower.", ""),
        layers="encoder.layers.{i}",
        target=f"{part}/",
        config=f"{part}_config",
        settings=dict(zip(_SIZES, sizes, strict=True)),
    )


_CLIP_TEXTS = _clip(_CLIP_TEXT, "text", 512, 8, 12)
_SIGLIP_TEXT = _clip(_CLIP_TEXT, "text", 768, 12, 12)
_CLIP_IMAGES = _clip(_CLIP_VISION + _TASKS, "vision", 768, 12, 12)


def _bert(name: str, head: str) -> Tower:
    return Tower(table=_BERT + head + _TASKS, prefixes=(f"{name}.", ""), layers="encoder.layer.{i}", settings=_TIED)


def _t5(table: str, part: str, layers: str) -> Tower:
    sizes = dict(zip(_SIZES, ("d_model", "num_heads", layers), strict=True))
    return Tower(
        table=table,
        prefixes=(f"{part}.",),
        layers="block.{i}",
        target=f"{part}/",
        keys={**sizes, "head_dim": "d_kv"},
        # transformers 5 ties every T5, and keeps the setting of older versions as scale_decoder_outputs.
        settings={**_TIED, "scale_decoder_outputs": True},
    )


def _whisper(table: str, part: str) -> Tower:
    sizes = zip(_SIZES, ("d_model", f"{part}_attention_heads", f"{part}_layers"), strict=True)
    return Tower(
        table=table, prefixes=(f"model.{part}.", f"{part}."), target=f"{part}/", keys=dict(sizes), settings=_TIED
    )


FAMILIES: Mapping[str, Sequence[Tower]] = {
    "llama": (Tower(table=_LLAMA),),
    "mistral": (Tower(table=_LLAMA),),
    "qwen2": (Tower(table=_LLAMA, settings={"qkv_bias": True}),),
    "qwen3": (Tower(table=_LLAMA + _HEAD_NORMS),),
    "gemma": (Tower(table=_gemma(_LLAMA), settings=_TIED),),
    "gemma2": (Tower(table=_gemma(_MODEL + _ATTENTION + _MLP + _GEMMA2_NORMS), settings=_TIED),),
    "gemma3_text": (_GEMMA3_TEXT,),
    "gpt2": (
        Tower(
            table=_GPT2 + _TASKS,
            prefixes=("transformer.", ""),
            layers="h.{i}",
            settings=_TIED,
            keys={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"},
        ),
    ),
    "qwen3_moe": (Tower(table=_LLAMA + _HEAD_NORMS + _EXPERTS),),
    "qwen2_moe": (Tower(table=_LLAMA + _EXPERTS + _QWEN2_MOE, settings={"qkv_bias": True}),),
    "mixtral": (Tower(table=_MODEL + _ATTENTION + _NORMS + _MIXTRAL + _EXPERTS),),
    "gpt_oss": (_GPT_OSS_TOWER,),
    "deepseek_v3": (Tower(table=_MODEL + _DEEPSEEK + _MLP + _NORMS + _EXPERTS, has_given_heads=True),),
    "llama4_text": (_LLAMA4_TEXT,),
    "phi3": (Tower(table=_MODEL + _PHI3 + _NORMS),),
    "olmo2": (Tower(table=_MODEL + _ATTENTION + _MLP + _OLMO2),),
    "olmo3": (Tower(table=_MODEL + _ATTENTION + _MLP + _OLMO2),),
    "gpt_neox": (Tower(table=_GPT_NEOX + _TASKS, prefixes=("gpt_neox.", ""), settings={"attention_bias": True}),),
    "gemma3": (
        replace(_GEMMA3_TEXT, config="text_config"),
        _clip(_CLIP_VISION + _GEMMA3_PROJECTOR, "vision", 1152, 16, 27),
    ),
    "llama4": (
        replace(_LLAMA4_TEXT, config="text_config"),
        Tower(
            table=_LLAMA4_VISION,
            prefixes=("vision_model.",),
            layers="model.layers.{i}",
            target="vision/",
            config="vision_config",
        ),
    ),
    "bert": (_bert("bert", _BERT_HEAD),),
    "roberta": (_bert("roberta", _ROBERTA_HEAD),),
    "siglip": (_SIGLIP_TEXT, _CLIP_IMAGES),
    "siglip_text_model": (replace(_SIGLIP_TEXT, config=""),),
    "siglip_vision_model": (replace(_CLIP_IMAGES, config=""),),
    "clip": (_CLIP_TEXTS, _CLIP_IMAGES),
    "clip_text_model": (replace(_CLIP_TEXTS, config=""),),
    "clip_vision_model": (replace(_CLIP_IMAGES, config=""),),
    "t5": (_t5(_T5_ENCODER, "encoder", "num_layers"), _t5(_T5_DECODER, "decoder", "num_decoder_layers num_layers")),
    "whisper": (_whisper(_WHISPER_ENCODER, "encoder"), _whisper(_WHISPER_DECODER, "decoder")),
}
"""The towers of each family, by the model_type in config.json."""

SINGLE_TOWERS: Mapping[str, str] = {
    "T5EncoderModel": "encoder/",
    "WhisperForAudioClassification": "encoder/",
    "WhisperForCausalLM": "decoder/",
    "CLIPForImageClassification": "vision/",
    "SiglipForImageClassification": "vision/",
}
"""The only tower that some architectures have, by its target."""

CONSTANTS = (
    "transformer.h.{i}.attn.bias",
    "transformer.h.{i}.attn.masked_bias",
    "h.{i}.attn.bias",
    "h.{i}.attn.masked_bias",
    "model.layers.{i}.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
    "layers.{i}.self_attn.rotary_emb.inv_freq",
    "rotary_emb.inv_freq",
    "embeddings.position_ids",
    "bert.embeddings.position_ids",
    "roberta.embeddings.position_ids",
    "text_model.embeddings.position_ids",
    "vision_model.embeddings.position_ids",
    "gpt_neox.layers.{i}.attention.bias",
    "gpt_neox.layers.{i}.attention.masked_bias",
    "gpt_neox.layers.{i}.attention.rotary_emb.inv_freq",
    "layers.{i}.attention.bias",
    "layers.{i}.attention.masked_bias",
    "layers.{i}.attention.rotary_emb.inv_freq",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)
"""Constants that older versions of transformers stored and newer ones ignore: causal masks, numbers of positions, and
the frequencies of rotary positions, which follow from the configuration; and a bias of T5 that is not used."""
