"""Excerpts of our own making, after published configuration files of each framework."""

AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3.1-8B
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_layer_norm: true
datasets:
  - path: someone/some-data
    type: alpaca
sequence_len: 4096
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
flash_attention: true
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
a_field_of_tomorrow: 3
"""
QLORA = """\
base_model: someone/llama-3-70b-fp16
load_in_4bit: true
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 512
micro_batch_size: 1
optimizer: paged_adamw_8bit
bf16: auto
gradient_checkpointing: true
datasets: []
"""
LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
ZERO_3 = """\
model_name_or_path: mistralai/Mistral-7B-v0.1
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
"""
TRAINER = """\
model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
gradient_checkpointing: true
max_seq_length: 2048
per_device_train_batch_size: 16
per_device_eval_batch_size: 8
lora_r: 16
report_to: [wandb]
"""
LITGPT = """\
checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B
precision: bf16-true
quantize: bnb.nf4-dq
devices: 1
lora_r: 32
lora_query: true
lora_key: false
lora_value: true
lora_mlp: true
data:
  class_path: litgpt.data.Alpaca2k
train:
  global_batch_size: 8
  micro_batch_size: 1
  max_seq_length: 512
  learning_rate: 0.0002
"""
TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 32
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
MEGATRON = """\
#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=16
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT=$1 #<where> --num-layers 7
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${NUM_NODES}
)
MODEL_ARGS="--num-layers 96 --hidden-size 12288 \\
    --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 51200"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $MODEL_ARGS \\
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \\
    --fp16 --use-distributed-optimizer --attention-dropout 0.0 --hidden-dropout 0.0 \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel \\
    --recompute-granularity selective --lr 6.0e-5 --save $CHECKPOINT
"""
NEMO = """\
name: megatron_gpt
trainer:
  devices: 8
  num_nodes: 2
  precision: bf16
model:
  micro_batch_size: 4
  global_batch_size: 128
  tensor_model_parallel_size: 4
  encoder_seq_length: 512
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 12
  hidden_size: 768
  ffn_hidden_size: 3072
  num_attention_heads: 12
  activation: fast-swiglu
  bias: false
  kv_channels: null
  megatron_amp_O2: true
  optim:
    name: distributed_fused_adam
    lr: 2e-4
"""
NEMO_RECIPE = """\
_partial_: true
_target_: nemo.collections.llm.api.pretrain
data:
  _target_: nemo.collections.llm.gpt.data.pre_training.PreTrainingDataModule
  global_batch_size: 128
  micro_batch_size: 1
  paths: &paths [somewhere]
  seq_length: 8192
  tokenizer: &tokenizer
    _target_: nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer
    pretrained_model_name: meta-llama/Llama-3.1-8B
model:
  _target_: nemo.collections.llm.gpt.model.llama.LlamaModel
  config:
    _target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B
    num_layers: 16
    recompute_granularity: full
    a_field_of_tomorrow: 3
optim:
  _target_: nemo.lightning.pytorch.optim.megatron.MegatronOptimizerModule
  config:
    _target_: megatron.core.optimizer.optimizer_config.OptimizerConfig
    bf16: true
    optimizer: adam
    use_distributed_optimizer: true
trainer:
  _target_: nemo.lightning.pytorch.trainer.Trainer
  callbacks:
  - _target_: nemo.lightning.pytorch.callbacks.flops_callback.FLOPsMeasurementCallback
    data_config: {paths: *paths, tokenizer: *tokenizer}
  devices: 8
  num_nodes: 2
  plugins:
    _target_: nemo.lightning.pytorch.plugins.mixed_precision.MegatronMixedPrecision
    fp8: hybrid
    fp8_param_gather: true
    fp8_recipe: tensorwise
    grad_reduce_in_fp32: false
    params_dtype: {_call_: false, _target_: torch.bfloat16}
    precision: bf16-mixed
  strategy:
    _target_: nemo.lightning.pytorch.strategies.megatron_strategy.MegatronStrategy
    context_parallel_size: 2
    ddp: {_target_: megatron.core.distributed.DistributedDataParallelConfig, grad_reduce_in_fp32: true}
    fsdp: null
    sequence_parallel: true
    tensor_model_parallel_size: 4
"""
TORCHTUNE = """\
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 4096
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
batch_size: 2
gradient_accumulation_steps: 8
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
enable_activation_checkpointing: True
enable_activation_offloading: True
compile: False
dtype: bf16
"""
TORCHTUNE_FULL = """\
tokenizer: {max_seq_len: 1024}
model: {_component_: torchtune.models.qwen2_5.qwen2_5_7b_instruct}
batch_size: 1
optimizer: {_component_: torch.optim.AdamW, fused: True}
enable_activation_checkpointing: False
dtype: bf16
"""
DEEPSPEED = """\
{"bf16": {"enabled": true},
 "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "overlap_comm": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
 "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto", "steps_per_print": 2000}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_processes: 8
"""
GPT_NEOX = """\
{
  # a comment
  "pipe_parallel_size": 4,
  "model-parallel-size": 2,
  "num_layers": 44,
  "hidden_size": 6144,
  "num-attention-heads": 64,
  "seq_length": 2048,
  "max_position_embeddings": 2048,
  "norm": "layernorm",
  "pos_emb": "rotary",
  "rotary_pct": 0.25,
  "no_weight_tying": true,
  "gpt_j_residual": true,
  "bias_gelu_fusion": true,
  "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95]}},
  "zero_optimization": {"stage": 1, "reduce_bucket_size": 1260000000, "contiguous_gradients": True},
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 32,
  "checkpoint_activations": true,
  "checkpoint_num_layers": 1,
  "partition_activations": false,
  "hidden_dropout": 0,
  "attention-dropout": 0,
  "fp16": {"fp16": true, "enabled": true, "loss_scale": 0},
  "global_num_gpus": 96,
  "a_field_of_tomorrow": 3,
}
"""
