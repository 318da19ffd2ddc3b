"""Helpers, models, fixtures and programs that tests share. Nothing here is a test.

Compare numbers
    parity              engines, references of one device, errors of gradients; so do `context_parity`, `expert_parity`
                        and `frozen_parity` for models with rows in parts, experts, and weights that stay
    layouts             the layouts that grids go through, parts of a grid, bytes on the wire
    faults              faults that a comparison must find
    source_losses       the loss of each source of rows
    reference_gradients transformers as an oracle; its small models are in `hf_decoders`, `hf_encoders`, `hf_images`
    deepspeed_runs      steps under DeepSpeed; `deepspeed_state` has what it saves
    triton_kernels      our Triton kernels beside the references, interpreted or on a GPU
    golden_curves       loss curves and parameter names that are stored
    tensors             drawn tensors, values and every gradient of two results
    sharded_engines     state that two ranks share
    uninitialized_memory  memory of NaN, misaligned tensors, calls that make the host wait
Small models, batches, configs
    models, batches     of every family
    pattern_models, image_models, tower_models, llava_models  of one kind
    images              images and captions, as files or as a batch
    text_objectives     objectives, and their fields of a document
    recommended_layouts a layout for each preset
Files
    files               files of JSON lines, damaged files
    packed_corpora      corpora on disk and in memory, and the rows that they are packed into
    webdatasets         shards of others; `corpus_fuzzer` damages them
    text_files, prep_files, prep_tasks, tokenizer_cases  what data_prep reads, does and is stopped in
    hf_folders          folders of transformers
    finetuning_tasks    files of tasks and small models to fine-tune; `evaluated_tasks` has some to evaluate
    small_runs          a small corpus and its run; `trained_runs` and `reported_runs` are made up
    checkpoint_schemas  a checkpoint's metadata, changed
    documentation       the manual and the source; `layout_table` makes the tables of a page
Processes
    workers             ranks that are started once and run a test's functions
    rank_processes      ranks that misbehave; `killed_ranks`, `kill_series` and `power_loss` end them
    training_runs       training in a worker, and what it left
    forked_commands     commands, in a fork or in this process; `forked_traces`, and `forked_jobs` for SLURM
    launch_jobs         `megatfm launch` and jobs; `slurm_cluster` is a real one
    monitor_clients, waiting  the other end of a connection; a condition that comes true
    preload, python_client, signal_prep  programs that are started, not imported
Around each test
    process_state, page_cache  what must be as before, seeds, `os.fsync`
"""
