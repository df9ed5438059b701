"""The rows of grids that only `nox -s meshes` runs: other rows and tests cover what they do, in less time.

They get the marker `meshes` as those do that have it where they are written. A name that is gone stops the run.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

THINNED = {
    # Meshes: each axis stays in a row of two ranks, pipelines beside others in one of four.
    "meshes/test_equality.py::test_a_mesh_trains_as_one_process_does": (
        "pp2-rep2-ep2,zero_bubble,acc2",
        "pp2-shard2-ep2,dual_pipe_v,expert_dispatch=peer,expert_capacity=1.0",
        "rep2-cp2-ep2",
        "rep2-shard2-ep2,mb2",
        "shard4,peft=layers",
        "pp2,zero_bubble_v,peft=layers",
        "cp2,heads2x2,peft=layers",
    ),
    "meshes/test_weight_averages.py::test_a_mesh_averages_as_one_process_does": ("shard4",),
    "meshes/test_weight_averages.py::test_averages_go_on_on_another_mesh": ("pp2-shard2-consolidated",),
    "meshes/test_weight_averages.py::test_plain_means_and_updates_every_few_steps": ("settings0", "settings2"),
    "meshes/test_optimizers.py::test_groups_and_schedule_on_two_meshes": ("shard2-rep2-ep2", "rep2-ep2-pp2"),
    "meshes/test_packed_documents.py::test_each_document_of_a_file_of_tokens_is_as_alone": ("tp",),
    "meshes/test_packed_documents.py::test_each_chat_is_as_alone": ("tp-True",),
    "meshes/test_muon.py::test_a_mesh_trains_as_one_process_does": ("rep4-ep4", "shard4"),
    "meshes/test_each_optimizer.py::test_several_steps_are_those_of_one_process": ("tp2-Adam",),
    "meshes/test_step_in_backward.py::test_a_mesh_trains_as_one_process_does": ("rep2", "pp2,zero_bubble_v,tied"),
    "meshes/test_round_trips.py::test_another_mesh_goes_on": ("shard2-ep2->pp2,zero_bubble_v,adapted",),
    "models/test_qwen3_moe_balance.py::test_two_ranks_equal_one_process": (
        "tensor recomputed",
        "context recomputed",
        "replicas",
    ),
    "models/test_qwen3_moe_balance.py::test_pipelines_equal_one_process": ("1f1b-dense1", "interleaved_1f1b-dense2"),
    "models/test_qwen3_moe_states.py::test_states_on_a_mesh_are_those_of_one_process": (
        "cp2,heads2x2,context=heads",
        "pp2-cp2,interleaved_1f1b,mb4,packed",
        "tp2,heads4x2",
    ),
    "models/test_qwen3_moe_pipeline.py::test_weights_come_in_and_go_out_and_text_is_that_of_the_whole_model": (
        "zero_bubble_v-untied",
        "interleaved_1f1b-tied",
        "interleaved_1f1b-untied",
        "1f1b-tied",
    ),
    "models/test_qwen3_moe_huggingface_sharded.py::test_four_ranks_read_and_write_as_one_process": (
        "experts, rows",
        "rows and columns",
        "copies of shards",
        "tensor",
    ),
    "models/test_qwen3_moe_huggingface_sharded.py::test_fused_experts": ("experts, rows",),
    "models/test_qwen3_moe_huggingface_sharded.py::test_two_stages_of_two_shards": ("tied", "split", "plain"),
    "models/test_qwen3_moe_huggingface_batches.py::test_a_batch_encoding_on_ranks": (
        "padded-data parallel",
        "even-fully sharded",
        "even-context parallel",
        "padded-pipeline",
    ),
    # The strategy
    "strategy/test_mixed_replicas.py::test_replicas_of_two_ranks_equal_the_matrices": (
        "messages-shard2",
        "messages-pp2",
        "copies-shard2",
        "copies-tp2",
        "copies-pp2 tied",
        "copies-accumulated",
    ),
    "strategy/test_mixed_replicas.py::test_four_replicas_equal_the_matrices": ("copies-ring",),
    "strategy/test_mixed_replicas.py::test_two_replicas_equal_the_matrices": (
        "complete-adamw",
        "ring-sgd",
        "alternating_exp_ring-adamw",
    ),
    "strategy/test_fully_sharded.py::test_a_checkpoint_goes_on_on_another_mesh": ("pipeline",),
    "strategy/test_fully_sharded.py::test_narrow_weights_have_float32_gradients": (
        "one microbatch-experts",
        "several-weights",
    ),
    "strategy/test_logged_values.py::test_four_ranks_log_what_one_process_logs": ("shard2 tp2 ep4",),
    "strategy/test_pipeline.py::test_two_stages_of_ranks_equal_plain_torch": (
        "looped_bfs",
        "zero_bubble",
        "interleaved_1f1b",
    ),
    "strategy/test_pipeline.py::test_replicas_of_pipelines_equal_plain_torch": ("interleaved", "known weight"),
    "strategy/test_pipeline.py::test_four_ranks_of_stages_equal_plain_torch": ("1f1b",),
    "strategy/test_pipeline.py::test_a_batch_that_is_one_microbatch": ("interleaved_1f1b",),
    "strategy/test_files_of_pipelines.py::test_files_and_directories": ("1f1b",),
    "strategy/test_files_of_pipelines.py::test_files_and_directories_of_shards": (),
    "strategy/test_sharded.py::test_the_same_mesh_goes_on_bit_for_bit": ("shard",),
    "strategy/test_sharded.py::test_another_mesh_goes_on_in_the_middle_of_an_epoch": ("hybrid-auto-tensor",),
    "strategy/test_tensor_and_context.py::test_narrow_numbers_are_near_wide_ones": ("tp-bf16-true", "cp-bf16-mixed"),
    "strategy/test_tensor_and_context.py::test_hugging_face_directories": ("shard, tp",),
    "strategy/test_nonfinite_router.py::test_with_experts_on_two_ranks": (
        "reads found_inf-data_parallel_replicate",
        "asks the host-data_parallel_shard",
    ),
    "strategy/test_stock_checkpoints.py::test_ddp": ("False-shards", "False-tensors", "False-stages of data ranks"),
    "strategy/test_token_mixing.py::test_what_mixes_tokens_is_refused": (
        *("Flex-tp2", "Written-tp2", "ZeroAtFirst-tp2", "MultiheadAttention-tp2"),
        *("GRU-tp2", "Running-tp2", "LessMean-tp2", "BatchNorm1d-tp2"),
    ),
    "strategy/test_token_mixing.py::test_what_pools_tokens_is_refused": ("first-tp2", "last-tp2"),
    "strategy/test_pipeline_faults.py::test_job_whose_other_ranks_end": (
        "raise-backward 0B2",
        "kill-backward 0B2",
        "stop-forward 1F2",
    ),
    "strategy/test_resume_loaders.py::test_every_loader_goes_on_exactly": (
        "stream, workers-Staged",
        "stateful, workers-Plain",
    ),
    "strategy/test_resume_loaders.py::test_an_epoch_that_a_limit_ends_is_over": ("stream, workers",),
    "strategy/test_resume_loaders.py::test_saved_in_the_last_batch_of_an_epoch": ("stream, workers",),
    "strategy/test_trained_only.py::test_another_base_is_refused": ("sharded",),
    # Loops, data, callbacks, checkpoints
    "loop/test_uneven_batches.py::test_a_run_goes_on_in_the_middle_of_an_epoch": (
        "a DataLoader-2-1",
        "with workers-2-1",
        "counted batches-1-2",
    ),
    "loop/test_uneven_batches.py::test_two_pipelines": ("Mean",),
    "loop/test_batches_ahead.py::test_uneven_ranks_go_on_behind_what_was_trained_on": ("1-3-4",),
    "callbacks/test_predictions.py::test_meshes_write_what_one_process_does": ("True-tp2 cp2", "False-pp2 dp2"),
    "callbacks/test_weight_averages.py::test_a_checkpoint_has_averages_beside_the_weights": ("consolidated-False",),
    "checkpoint/test_optimizers.py::test_any_mesh_goes_on_from_any_mesh": ("momentum-meshes1",),
    "datamodules/test_chat.py::test_a_resumed_run_has_the_rows_of_an_uninterrupted_one": ("False",),
    "state/test_full_disk.py::test_killed_exports_leave_the_old_or_the_new": ("False",),
    "state/test_full_disk.py::test_killed_exports_to_a_store_leave_the_old_or_the_new": ("True",),
    # Executor, plans, sums
    "pipeline/test_executor.py::test_four_ranks": ("all trained-3,8",),
    "pipeline/test_executor.py::test_two_ranks": ("recompute-1,2,5", "half frozen-1,2,5"),
    "parallel/test_plan.py::test_ranks_sum_as_the_table_says": (
        *("rep4 ep2-8-2-layouts1", "rep2 shard2-8-2-layouts3", "shard4-2-2-layouts4"),
        *("rep2 shard2 ep4-8-2-layouts7", "rep2 tp2-8-2-layouts8", "rep2 cp2-8-2-layouts14"),
        "shard2 cprep2-8-2-layouts16",
    ),
    "parallel/test_account.py::test_bytes_of_a_rank_are_those_of_the_table": (
        *("an expert a rank-torch.bfloat16", "experts within a replica-torch.float32", "shards-torch.bfloat16"),
        *("tensor and shards-torch.bfloat16", "tensor and context-torch.bfloat16"),
    ),
    "parallel/test_account.py::test_ranks_that_share_a_copy_hold_each_element_once": (
        "20-pp2 rep2 shard8",
        "24-rep2 shard16 ep8",
        "8-shard4 cprep2 tp4 ep8",
    ),
    "parallel/test_graphs.py::test_by_a_trainer": ("bf16-true-cpu",),
    "parallel/test_compiling.py::test_losses_and_gradients_are_those_of_the_model": (
        "whole-full",
        "whole-offload",
        "split-every_2",
        "split-none",
    ),
    "parallel/test_compiling.py::test_numbers_of_tokens_that_travel_are_not_compiled": ("all_to_all-none-False",),
    "parallel/test_recompute.py::test_fully_sharded_blocks_are_gathered_once_in_the_backward": (
        "selective",
        "attention",
    ),
    "sync/test_norm.py::test_four_ranks": (
        *("shards, tensor, experts-1", "shards, tensor, experts-3.5", "shards, tensor, experts-inf"),
        *("shards, tensor, experts on all ranks-1", "shards, tensor, experts on all ranks-2"),
        "shards, tensor, experts on all ranks-3.5",
    ),
    "sync/test_norm.py::test_fully_sharded_layers_and_experts": ("1-1", "1-3.5", "2-1", "2-2", "2-3.5", "4-inf"),
    # Adapters
    "peft/test_kernels.py::test_experts_over_ranks": (),
    "peft/test_kernels.py::test_compiled_blocks_on_ranks": ("{'data_parallel_replicate': 2, 'expert_parallel': 2}",),
    "peft/test_kernels.py::test_recomputed": ("selective-cpu", "every_2-cpu"),
    "peft/test_kernels.py::test_split_backward": ("none-cpu",),
    "peft/test_refused.py::test_files_of_another_base": (
        "shape-{'data_parallel_shard': 2, 'expert_parallel': 2}",
        "name-{'data_parallel_shard': 2, 'expert_parallel': 2}",
        "unknown-{'data_parallel_shard': 2, 'expert_parallel': 2}",
        "shape of an expert-{'pipeline_parallel': 2}",
    ),
    "peft/test_refused.py::test_merging_sharded_weights": ("{'data_parallel_shard': 2, 'expert_parallel': 2}",),
    "peft/test_files.py::test_ranks_write_and_read_what_one_process_does": ("{'tensor_parallel': 2}",),
    "peft/test_merged.py::test_ranks_write_what_one_process_merges": ("{'data_parallel_shard': 2}",),
    # Kernels in the interpreter
    "modules/test_peer_dispatch.py::test_equals_all_to_all_bit_by_bit": (
        "torch.float32-triton-4",
        "torch.bfloat16-triton-4",
        "torch.float32-triton-2",
    ),
    "ops/test_rope.py::test_every_shape_and_dtype": (
        *("True-paired-False-cpu", "True-alone-True-cpu", "True-alone-False-cpu"),
        *("False-paired-True-cpu", "False-paired-False-cpu", "False-alone-True-cpu"),
    ),
    "ops/test_attention.py::test_small_shapes": ("shape1-None-7-False-cpu", "shape3-None-None-True-cpu"),
    "ops/test_attention.py::test_every_layout": ("contiguous-cpu", "transposed-cpu"),
    "ops/test_adapted_experts.py::test_every_rank": (
        *("2-swiglu-cpu", "16-swiglu-cpu", "2-down-cpu", "16-down-cpu", "2-gate_up-cpu", "16-gate_up-cpu"),
    ),
    # Training and measuring as a whole
    "benchmarks/test_data.py::test_a_loader_and_a_step": (),
    "benchmarks/test_muon.py::test_the_share_of_a_step_is_told": (),
    "benchmarks/test_pipeline.py::test_what_is_measured": (),
    "benchmarks/test_step_in_backward.py::test_contenders_do_the_same_work": (),
    "benchmarks/test_streaming.py::test_processes_need_little_private_memory": ("2",),
    "benchmarks/test_training.py::test_gradients_are_those_of_copies_and_bytes_those_computed": ("2",),
    "cli/test_30b_examples.py::test_eight_processes_train_as_one": (),
    "cli/test_30b_examples.py::test_a_tiny_model_trains": ("one_gpu",),
    "cli/test_gallery.py::test_losses_are_those_of_replicas": ("two_nodes",),
    "harness/test_pool.py::test_no_process_survives_the_session": ("2",),
    "models/test_qwen3_moe_initial_values.py::test_ours_train_as_numpys": (),
    "optim/test_state_dtypes.py::test_losses_on_text": (),
}
"""By test: the rows by their ids, or none where it has no rows."""
NAMES = frozenset(
    f"tests/{test}{row}" for test, rows in THINNED.items() for row in ([f"[{row}]" for row in rows] or [""])
)


@pytest.hookimpl(wrapper=True)  # before others leave some out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark the rows.

    Raises:
        pytest.UsageError: If a name is of no test in the files that were collected.
    """
    collected = {item.nodeid for item in items}
    files = {name.split("::")[0] for name in collected}
    gone = sorted(name for name in NAMES - collected if name.split("::")[0] in files)
    if gone and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"there are no tests {gone}, which {__name__} names: mend it")
    for item in items:
        if item.nodeid in NAMES:
            item.add_marker(pytest.mark.meshes)
    return (yield)
