"""This installation and this machine, examined: what `brim doctor` and `brim --version` say."""
