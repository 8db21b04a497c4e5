-- Requires: emit. Emits an event given as a JSON object; one without `kind` means that there is nothing to tell.
local function emit_given(event)
  local more = cjson.decode(event)
  local kind = more.kind
  more.kind = nil
  if kind then
    emit(kind, more)
  end
end
