"""Rows that train model families of transformers, made from small configurations with random weights."""

from __future__ import annotations

from typing import Any

import torch

from bench.compatible.side import Side, drawn, row, tokens

GROUP = "families"
NEEDS = ("transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "resid_pdrop": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
GPT = {"vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {**GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SEQUENCES = {
    "vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "encoder_layers": 3,
    "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": None, "dropout": 0.1, "dropout_rate": 0.1,
}  # fmt: skip
PICTURES = {**SIZES, "image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 4}
SOUND = {
    **SIZES, "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
    "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 4, "classifier_proj_size": 32, "activation_dropout": 0.1,
    "feat_proj_dropout": 0.1,
}  # fmt: skip


def _batch(kind: str, number: int) -> dict[str, torch.Tensor]:
    ids = tokens(number, 2, 16, below=250) + 3
    if kind == "causal":
        return {"input_ids": ids, "labels": ids}
    if kind == "masked":
        return {"input_ids": ids, "labels": ids.where(drawn(number, 2, 16) > 0, -100), "attention_mask": torch.ones_like(ids)}
    if kind == "classes":
        return {"input_ids": ids, "labels": tokens(number, 2, below=2)}
    if kind == "sequences":
        return {"input_ids": ids, "labels": tokens(number + 100, 2, 8, below=250) + 3}
    if kind == "picture":
        return {"pixel_values": drawn(number, 2, 3, 32, 32), "labels": tokens(number, 2, below=4)}
    if kind == "segments":
        return {"pixel_values": drawn(number, 2, 3, 32, 32), "labels": tokens(number, 2, 32, 32, below=4)}
    if kind == "patches":
        return {"pixel_values": drawn(number, 2, 3, 32, 32)}
    if kind == "pairs":
        return {"input_ids": ids, "pixel_values": drawn(number, 2, 3, 32, 32), "return_loss": True}  # type: ignore[dict-item]
    if kind == "sound":
        return {"input_values": drawn(number, 2, 1600), "labels": tokens(number, 2, below=4)}
    if kind == "spectrum":
        return {"input_values": drawn(number, 2, 64, 16), "labels": tokens(number, 2, below=4)}
    if kind == "speech":
        return {"input_features": drawn(number, 2, 16, 64), "labels": tokens(number, 2, 8, below=250) + 3}
    if kind == "boxes":
        box = torch.tensor([1, 2, 30, 40]).expand(2, 16, 4)
        return {"input_ids": ids, "bbox": box, "labels": tokens(number, 2, 16, below=2)}
    if kind == "series":
        return {"past_values": drawn(number, 2, 32, 2), "future_values": drawn(number + 100, 2, 8, 2)}
    raise ValueError(kind)


def family(name: str, head: str, kind: str, model_type: str, **sizes: Any) -> None:
    """Register a family: ``AutoModelFor`` and ``head``, or the name of a class."""

    @row(GROUP, name, needs=NEEDS, slow=2)
    def _(side: Side) -> None:
        import transformers

        config = transformers.AutoConfig.for_model(model_type, **sizes)
        auto = getattr(transformers, f"AutoModel{head}", None)
        model = auto.from_config(config) if auto is not None else getattr(transformers, head)(config)
        model.train()
        side.page(model)
        optimizer = side.adamw(model.parameters(), lr=1e-3)
        side.train(model, optimizer, 3, loss=lambda model, number: model(**_batch(kind, number)).loss)


# -- decoders --------------------------------------------------------------------------------------------------------------

DECODERS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo", "olmo2", "olmo3", "granite", "cohere",
    "cohere2", "starcoder2", "stablelm", "glm", "glm4", "smollm3", "nemotron", "exaone4", "helium", "arcee", "seed_oss",
    "ernie4_5", "persimmon", "phi", "ministral",
)  # fmt: skip
for _type in DECODERS:
    family(_type, "ForCausalLM", "causal", _type, **GROUPED)
family("llama, tied embeddings", "ForCausalLM", "causal", "llama", **GROUPED, tie_word_embeddings=True)
family("llama, sequence classification", "ForSequenceClassification", "classes", "llama", **GROUPED)
family("llama, eager attention", "ForCausalLM", "causal", "llama", **GROUPED, attn_implementation="eager")
family("gemma3 (text)", "ForCausalLM", "causal", "gemma3_text", **GROUPED, sliding_window=8)
family("gemma3n (text)", "ForCausalLM", "causal", "gemma3n_text", **{
    **GROUPED, "intermediate_size": [128] * 4, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2,
})  # fmt: skip
family("gpt2", "ForCausalLM", "causal", "gpt2", **GPT)
family("gpt2, sequence classification", "ForSequenceClassification", "classes", "gpt2", **GPT, pad_token_id=0)
family("gpt_neo", "ForCausalLM", "causal", "gpt_neo", **{
    **SIZES, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "resid_dropout": 0.1,
    "window_size": 8,
})  # fmt: skip
family("gpt_neox", "ForCausalLM", "causal", "gpt_neox", **SIZES)
family("gptj", "ForCausalLM", "causal", "gptj", **GPT, rotary_dim=8)
family("gpt_bigcode", "ForCausalLM", "causal", "gpt_bigcode", **GPT)
family("gpt_oss", "ForCausalLM", "causal", "gpt_oss", **EXPERTS)
family("codegen", "ForCausalLM", "causal", "codegen", **GPT, rotary_dim=8)
family("opt", "ForCausalLM", "causal", "opt", **SIZES, ffn_dim=128, word_embed_proj_dim=64)
family("bloom", "ForCausalLM", "causal", "bloom", **SIZES, n_layer=4, n_head=4)
family("falcon", "ForCausalLM", "causal", "falcon", **SIZES)
family("mpt", "ForCausalLM", "causal", "mpt", vocab_size=256, d_model=64, n_heads=4, n_layers=4, max_seq_len=64)
family("biogpt", "ForCausalLM", "causal", "biogpt", **SIZES)
family("xglm", "ForCausalLM", "causal", "xglm", **SIZES, d_model=64, ffn_dim=128, num_layers=4, attention_heads=4)
family("ctrl", "ForCausalLM", "causal", "ctrl", vocab_size=256, n_embd=64, n_layer=4, n_head=4, n_positions=64, dff=128)

# -- experts and recurrent ones --------------------------------------------------------------------------------------------

for _type in ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "ernie4_5_moe"]:
    family(_type, "ForCausalLM", "causal", _type, **{**EXPERTS, "shared_expert_intermediate_size": 64})
LATENT = {
    **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
family("deepseek_v2", "ForCausalLM", "causal", "deepseek_v2", **LATENT)
family("deepseek_v3", "ForCausalLM", "causal", "deepseek_v3", **LATENT)
family("glm4_moe", "ForCausalLM", "causal", "glm4_moe", **{**LATENT, "head_dim": 16})
STATES = {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8, "expand": 2}
family("mamba", "ForCausalLM", "causal", "mamba", **SIZES, state_size=8)
family("mamba2", "ForCausalLM", "causal", "mamba2", **SIZES, **STATES)
family("falcon_mamba", "ForCausalLM", "causal", "falcon_mamba", **SIZES, state_size=8)
family("rwkv", "ForCausalLM", "causal", "rwkv", **SIZES, attention_hidden_size=64, context_length=64)
family("recurrent_gemma", "ForCausalLM", "causal", "recurrent_gemma", **GROUPED, lru_width=64, attention_window_size=16)
family("jamba", "ForCausalLM", "causal", "jamba", **EXPERTS, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
       use_mamba_kernels=False)  # fmt: skip
family("qwen3_next", "ForCausalLM", "causal", "qwen3_next", **EXPERTS, shared_expert_intermediate_size=64,
       linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)  # fmt: skip

# -- encoders --------------------------------------------------------------------------------------------------------------

ENCODERS = (
    "bert", "roberta", "electra", "deberta", "deberta_v2", "xlm_roberta", "mpnet", "camembert", "ernie",
    "megatron_bert", "nystromformer",
)  # fmt: skip
for _type in ENCODERS:
    family(_type.replace("_", "-") if _type == "xlm_roberta" else _type, "ForMaskedLM", "masked",
           {"deberta_v2": "deberta-v2", "xlm_roberta": "xlm-roberta", "megatron_bert": "megatron-bert"}.get(_type, _type),
           **SIZES, embedding_size=64)  # fmt: skip
family("bert, sequence classification", "ForSequenceClassification", "classes", "bert", **SIZES)
family("deberta_v2, relative attention", "ForMaskedLM", "masked", "deberta-v2", **SIZES, relative_attention=True,
       position_biased_input=False, pos_att_type=["p2c", "c2p"])  # fmt: skip
family("albert", "ForMaskedLM", "masked", "albert", **{**SIZES, "hidden_size": 128}, embedding_size=32)
family("distilbert", "ForMaskedLM", "masked", "distilbert", **SIZES, dim=64, hidden_dim=128, n_layers=4, n_heads=4)
family("modernbert", "ForMaskedLM", "masked", "modernbert", **SIZES, embedding_dropout=0.1, mlp_dropout=0.1,
       sep_token_id=2, cls_token_id=1, reference_compile=False)  # fmt: skip
family("xlnet", "XLNetLMHeadModel", "causal", "xlnet", vocab_size=256, d_model=64, n_layer=4, n_head=4, d_inner=128)
family("xlm", "ForSequenceClassification", "classes", "xlm", vocab_size=256, emb_dim=64, n_layers=4, n_heads=4)
family("squeezebert", "ForMaskedLM", "masked", "squeezebert", **SIZES, embedding_size=64)
family("funnel", "ForMaskedLM", "masked", "funnel", vocab_size=256, d_model=64, n_head=4, d_head=16, d_inner=128,
       block_sizes=[2, 2])  # fmt: skip
family("convbert", "ForMaskedLM", "masked", "convbert", **SIZES, embedding_size=64)
family("roformer", "ForMaskedLM", "masked", "roformer", **SIZES, embedding_size=64)
family("fnet", "ForMaskedLM", "masked", "fnet", **SIZES)
family("longformer", "ForMaskedLM", "masked", "longformer", **SIZES, attention_window=8)
family("big_bird, full attention", "ForMaskedLM", "masked", "big_bird", **SIZES, attention_type="original_full")
family("layoutlm", "ForTokenClassification", "boxes", "layoutlm", **SIZES, max_2d_position_embeddings=64)

# -- encoders with decoders ------------------------------------------------------------------------------------------------

for _type in ["t5", "mt5", "umt5", "bart", "mbart", "pegasus", "blenderbot", "marian", "m2m_100", "plbart", "led", "longt5"]:
    family(_type, "ForSeq2SeqLM", "sequences", _type, **SEQUENCES, attention_window=8, max_encoder_position_embeddings=64,
           max_decoder_position_embeddings=64, local_radius=4)  # fmt: skip
family("prophetnet", "ForSeq2SeqLM", "sequences", "prophetnet", **{k: v for k, v in SIZES.items() if k != "num_hidden_layers"},
       num_encoder_layers=2, num_decoder_layers=2,
       num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
       decoder_start_token_id=1)  # fmt: skip
family("switch_transformers", "ForSeq2SeqLM", "sequences", "switch_transformers", **SEQUENCES, num_experts=4,
       num_decoder_layers=3, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)  # fmt: skip

# -- pictures, sound, pairs, series ----------------------------------------------------------------------------------------

family("deit", "DeiTForImageClassification", "picture", "deit", **PICTURES)
for _type in ["vit", "beit", "dinov2", "dinov2_with_registers", "vit_msn"]:
    family(_type, "ForImageClassification", "picture", _type, **PICTURES)
family("swin", "ForImageClassification", "picture", "swin", image_size=32, patch_size=2, embed_dim=32, depths=[2, 2],
       num_heads=[2, 4], window_size=4, num_labels=4, drop_path_rate=0.1)  # fmt: skip
family("swinv2", "ForImageClassification", "picture", "swinv2", image_size=32, patch_size=2, embed_dim=32, depths=[2, 2],
       num_heads=[2, 4], window_size=4, num_labels=4, drop_path_rate=0.1)  # fmt: skip
for _type in ["convnext", "convnextv2"]:
    family(_type, "ForImageClassification", "picture", _type, image_size=32, hidden_sizes=[32, 64, 96, 128],
           depths=[1, 1, 2, 1], num_labels=4, drop_path_rate=0.1)  # fmt: skip
family("resnet", "ForImageClassification", "picture", "resnet", embedding_size=16, hidden_sizes=[32, 64, 96, 128],
       depths=[1, 1, 1, 1], num_labels=4, layer_type="basic")  # fmt: skip
family("segformer", "ForSemanticSegmentation", "segments", "segformer", hidden_sizes=[16, 32, 64, 96], num_labels=4,
       num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=64)  # fmt: skip
family("vit_mae", "ForPreTraining", "patches", "vit_mae", **PICTURES, decoder_hidden_size=64, decoder_num_hidden_layers=2,
       decoder_num_attention_heads=4, decoder_intermediate_size=128)  # fmt: skip
_TOWER = {**SIZES, "image_size": 32, "patch_size": 8, "num_hidden_layers": 3}
for _type in ["clip", "siglip"]:
    family(_type, "", "pairs", _type, text_config=_TOWER, vision_config=_TOWER, projection_dim=32)
for _type in ["wav2vec2", "hubert", "wavlm", "unispeech"]:
    family(_type, "ForAudioClassification", "sound", _type, **SOUND)
family("audio_spectrogram_transformer", "ForAudioClassification", "spectrum", "audio-spectrogram-transformer", **{
    **SIZES, "num_labels": 4, "max_length": 64, "num_mel_bins": 16, "patch_size": 8,
})  # fmt: skip
family("whisper", "ForSpeechSeq2Seq", "speech", "whisper", **SEQUENCES, num_mel_bins=16, max_source_positions=32,
       max_target_positions=32)  # fmt: skip
family("speech_to_text", "ForSpeechSeq2Seq", "speech", "speech_to_text", **SEQUENCES, input_feat_per_channel=64,
       max_source_positions=64, max_target_positions=32, conv_channels=64)  # fmt: skip
family("patchtst", "PatchTSTForPrediction", "series", "patchtst", num_input_channels=2, context_length=32, prediction_length=8,
       patch_length=4, patch_stride=4, d_model=64, num_attention_heads=4, num_hidden_layers=3, ffn_dim=128)  # fmt: skip
