"""What a script that was written for DeepSpeed needs: its configuration, its engine, its schedulers."""
