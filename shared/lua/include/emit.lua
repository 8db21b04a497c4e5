-- Requires: events. Appends to what happened; `more` is a table of further fields, or nil.
local function emit(kind, more, ...)
  local entry = { 'kind', kind, ... }
  for field, value in pairs(more or {}) do
    entry[#entry + 1] = field
    entry[#entry + 1] = value
  end
  redis.call('XADD', events, 'MAXLEN', '~', 10000, '*', unpack(entry))
end
