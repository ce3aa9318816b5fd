"""What a model's files hold: its configuration and its tensors.

config           ModelConfig: one description of a model, for all native families
config_json      typed access to config.json
config_file      open_source and read_config: the files of a model, and its ModelConfig
families         each native family's config.json as a ModelConfig
llama_like       what the configurations of Llama's relatives have in common
gemma            the families of Gemma 1, 2 and 3; beside it ernie, glm, minimax, ministral3, olmo and smollm3
quantisation     parse_quantisation: quantization_config of a config.json
tensors          the tensors of a model's files
quantised_files  compressed-tensors, GPTQ, AWQ and FP8 checkpoints
rounded          models that --save-weights writes
mxfp4            matrices in MXFP4, and gpt-oss's checkpoints of them
gguf_config      gguf_config: the metadata of a GGUF file as a ModelConfig
gguf             the tensors of GGUF files
interleaved      Q and K of checkpoints in which RoPE turns neighbours of a head
gguf_layouts     how llama.cpp names and lays out tensors in GGUF files
"""
