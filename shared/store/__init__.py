"""The shared state in Redis: keys, one Lua script per change of state, typed wrappers around them."""
