-- Looks for keys that a leader wrote and that are gone by themselves, as a memory policy that evicts has it.
--
-- KEYS: leader herd leadership models aliases instances
-- ARGV: prefix token has_models has_aliases
--   has_models, has_aliases: 1 where the registry has any
-- Returns: the names of what is missing, without the prefix, or {STALE_LEADER}
-- Emits: nothing
-- @include fence
local missing = {}
local function expect(found, name)
  if not found or found == 0 then
    missing[#missing + 1] = name
  end
end
expect(redis.call('EXISTS', herd), 'herd')
expect(redis.call('HEXISTS', leadership, 'number'), 'leadership')
expect(has_models == '0' or redis.call('EXISTS', models), 'models')
expect(has_aliases == '0' or redis.call('EXISTS', aliases), 'aliases')
for _, name in ipairs(redis.call('ZRANGE', models, 0, -1)) do
  local known, instance = unpack(redis.call('HMGET', prefix .. 'model:' .. name, 'revision', 'instance'))
  expect(known, 'model:' .. name)
  if instance and instance ~= '' then
    expect(redis.call('ZSCORE', instances, instance), 'instances')
    expect(redis.call('HEXISTS', prefix .. 'instance:' .. instance, 'state'), 'instance:' .. instance)
  end
end
return missing
