"""What measurements have in common: ``tiered bench``, ``train`` and ``info`` use it, and the files of ``bench/``."""
