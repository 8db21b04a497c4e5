-- Removes an instance that is gone, with its leases.
--
-- KEYS: leader instances instance_key leases_key events
-- ARGV: prefix token instance model_fields state status end_class exit_code reason
--   model_fields: JSON object; exit_code may be empty
-- Returns: 1, 0 when there is no such instance (any more), or {STALE_LEADER}
-- Emits: status; inboxes: ended
-- @include fence
-- @include write
-- @include emit
-- @include tell
-- @include tell_lease_holders
local model = redis.call('HGET', instance_key, 'model')
if not model then
  redis.call('ZREM', instances, instance) -- its record was lost before it ended
  return 0
end
tell_lease_holders(instance, 'type', 'ended', 'instance', instance, 'model', model)
redis.call('DEL', instance_key, leases_key)
redis.call('ZREM', instances, instance)

local record = prefix .. 'model:' .. model
if redis.call('EXISTS', record) == 1 then
  redis.call('HINCRBY', record, 'ends:' .. end_class, 1)
end
local finish = { state = state, status = status, end_class = end_class, exit_code = exit_code, reason = reason }
if redis.call('HGET', record, 'instance') == instance then
  if redis.call('HGET', record, 'removed') == '1' then
    redis.call('DEL', record)
  else
    redis.call('HSET', record, 'instance', '')
    write(record, finish)
    write(record, cjson.decode(model_fields))
  end
end
emit('status', finish, 'model', model, 'instance', instance)
return 1
