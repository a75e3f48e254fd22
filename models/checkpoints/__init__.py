"""Published checkpoint families: specs from config.json, modules, and files of weights."""
