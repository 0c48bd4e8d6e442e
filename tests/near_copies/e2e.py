"""Of jobs through the commands."""

E2E: dict[str, dict[str, str]] = {
    "test_checkpoint_processes.py": {
        "test_killed_at_random_moments[2]": (
            "e2e/test_training_interrupted.py, killed in turn while a checkpoint is written"
        ),
    },
    "test_launch.py": {
        "test_fault[1]": "unit/test_launch.py, a killed rank; `make nightly` has every fault",
    },
    "test_training_damage.py": {
        "test_a_full_disk_loses_no_checkpoint_and_nothing_else": (
            "e2e/test_checkpoint_processes.py's two, of which one may write no more; "
            "unit/test_checkpoint_failures.py"
        ),
        "test_on_two_devices_the_same_data_follow": (
            "e2e/test_run_identity.py, an edited run that goes on on eight devices; "
            "unit/test_checkpoint.py restores on other meshes; unit/test_data_pipeline.py"
        ),
    },
    "test_training_run.py": {
        "test_newest_and_best_checkpoints_are_kept": (
            "unit/test_checkpoint.py keeps the newest and the best"
        ),
        "test_as_people_start_it": (
            "e2e/test_launch.py's two processes, started by `python -m jaxinfra` too; the start of "
            "e2e/test_package.py"
        ),
    },
}
