"""How a MODEL name becomes a workload: torchvision, timm, transformers, a Python factory."""
