"""File formats and the outside world: containers, configs, downloads, chat templates, command lines."""
