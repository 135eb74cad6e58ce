"""Runs launched by Hydra: its files and overrides make the configuration, and its folder holds the run.

python docs/examples/studies/hydra_launch.py local.lr=0.1 rounds=3
python docs/examples/studies/hydra_launch.py --multirun local.lr=0.02,0.1 seed=0,1
"""

from __future__ import annotations

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import mpifl


@hydra.main(version_base=None, config_path=".", config_name="hydra")
def main(config: DictConfig) -> float | None:
    """Return the final accuracy, which sweepers of Hydra optimise; None on ranks other than rank 0.

    Args:
        config: the configuration that Hydra has composed; its keys are those of mpifl.
    """
    output = {"folder": HydraConfig.get().runtime.output_dir, "id": "run"}
    run = mpifl.run(OmegaConf.to_container(config, resolve=True), output=output)
    return None if run is None else float(run.summary["accuracy_mean"])


if __name__ == "__main__":
    main()
