"""Helpers, models, fixtures and programs that tests share. Nothing here is a test.

Compare numbers
    parity              engines, references of one device, errors of gradients; so do `context_parity`, `expert_parity`
                        and `frozen_parity` for models with rows in parts, experts, and weights that stay
    layouts             the layouts that grids go through, parts of a grid, bytes on the wire
    source_losses       the loss of each source of rows
    reference_gradients transformers as an oracle; its small models are in `hf_folders` and `hf_encoders`
    deepspeed_runs      steps under DeepSpeed; `deepspeed_state` has what it saves
    triton_kernels      our Triton kernels beside the references, interpreted or on a GPU
    golden_curves       loss curves and parameter names that are stored
    tensors             drawn and misaligned tensors, every gradient of two results, NaN in memory, operators counted
    sharded_engines     state that two ranks share
Small models, batches, configs
    models, batches     of every family; attention patterns, and packed rows
    image_models, image_text_models  of one kind
    images              images and captions, as files or as a batch
    text_objectives     objectives, and their fields of a document; odd texts for tokenizers
    recommended_layouts a layout for each preset
Files
    files               files of JSON lines, damaged files, a checkpoint's metadata
    packed_corpora      corpora on disk and in memory, and the rows that they are packed into
    webdatasets         shards of others, and readers of damaged ones
    text_files          files of every format that data_prep reads; `prep_files` has its steps, tasks and outputs
    hf_folders          folders of transformers, small decoders
    finetuning_tasks    files of tasks, and small models to fine-tune or evaluate on them
    small_runs          a small corpus, its run, a trained one, and one made up for reports
    documentation       the manual and the source; `layout_table` makes the tables of a page
Processes
    workers             ranks that are started once and run a test's functions
    rank_processes      ranks that misbehave, and their monitor; `kill_series` and `power_loss` end them
    training_runs       training in a worker, and what it left
    forked_commands     commands, in a fork or in this process; `forked_traces` for the imaginary GPU
    launch_jobs         `megatfm launch` and jobs; `slurm_cluster` is a real one
    preload, python_client, signal_prep  programs that are started, not imported
Around each test
    process_state       what must be as before, seeds, `os.fsync`
"""
