"""Where models come from: folders, preset files, the option table of the engine."""
