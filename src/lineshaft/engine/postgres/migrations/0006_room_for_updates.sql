-- A row is updated a few times before it is deleted. With room on its page an update needs no new index entries: claims and heartbeats
-- write a third less WAL. Only new pages are filled this way.
ALTER TABLE lineshaft.task_live SET (fillfactor = 50);
