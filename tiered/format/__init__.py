"""The formats on disk: data files, manifests, lock files, lists of drives, and safetensors."""
