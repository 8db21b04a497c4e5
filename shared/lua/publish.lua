-- Makes the given models and aliases the registry, in one change. Models without fields stay as they are.
--
-- KEYS: leader models aliases herd events
-- ARGV: prefix token revision registry alias_names changes
--   registry: JSON list of {name, fields} or {name} in listing order; alias_names, changes: JSON objects
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
  local instance = redis.call('HGET', record, 'instance')
  if instance and instance ~= '' and redis.call('EXISTS', prefix .. 'instance:' .. instance) == 0 then
    -- Its record was lost before it ended.
    redis.call('HSET', record, 'instance', '', 'state', 'stopped', 'status', 'unloaded')
  end
  redis.call('HSET', record, 'name', name, 'order', order)
  if entry[2] then
    write(record, entry[2])
  end
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
local previous = redis.call('HGET', herd, 'registry_revision') or ''
if redis.call('EXISTS', herd) == 1 then -- its existence alone says that the herd is open
  redis.call('HSET', herd, 'registry_revision', revision)
end
emit('registry', nil, 'revision', revision, 'previous', previous, 'changes', changes)
return 1
