-- Requires: commands. Tells the supervisor. Trimming may lose a note, never a fact: the supervisor re-reads those.
local function ask(...)
  return redis.call('XADD', commands, 'MAXLEN', '~', 10000, '*', ...)
end
