-- Makes the given models and aliases the registry, in one change.
--
-- KEYS: leader models aliases herd events
-- ARGV: prefix token revision registry alias_names
--   registry: JSON list of {name, fields} in listing order; alias_names: JSON object
-- Returns: 1, or {STALE_LEADER}
-- Emits: registry
-- @include fence
-- @include write
-- @include emit
local given = {}
for order, entry in ipairs(cjson.decode(registry)) do
  local name = entry[1]
  local record = prefix .. 'model:' .. name
  given[name] = true
  if redis.call('EXISTS', record) == 0 then
    redis.call('HSET', record, 'instance', '', 'state', 'stopped', 'status', 'unloaded')
  end
  redis.call('HSET', record, 'name', name, 'order', order)
  write(record, entry[2])
  redis.call('HDEL', record, 'removed')
  redis.call('ZADD', models, order, name)
end
for _, name in ipairs(redis.call('ZRANGE', models, 0, -1)) do
  if not given[name] then
    local record = prefix .. 'model:' .. name
    redis.call('ZREM', models, name)
    if redis.call('HGET', record, 'instance') == '' then
      redis.call('DEL', record)
    else
      redis.call('HSET', record, 'removed', '1')
    end
  end
end
redis.call('DEL', aliases)
write(aliases, cjson.decode(alias_names))
if redis.call('EXISTS', herd) == 1 then -- its existence alone says that the herd is open
  redis.call('HSET', herd, 'registry_revision', revision)
end
emit('registry', nil, 'revision', revision)
return 1
