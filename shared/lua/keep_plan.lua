-- Keeps what a download consists of, if it is still wanted.
--
-- KEYS: download_key commands
-- ARGV: prefix name plan total
--   plan: JSON, kept as it is; total: bytes of all its files
-- Returns: 1, or 0 where there is no such download any more
-- Emits: nothing; commands: planned
-- @include ask
if redis.call('EXISTS', download_key) == 0 then
  return 0
end
redis.call('HSET', download_key, 'plan', plan, 'total', total)
ask('verb', 'planned', 'model', name)
return 1
