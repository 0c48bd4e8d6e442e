"""The gated delta rule in chunks on a Hopper GPU, by WGMMA and TMA."""
