package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

// DeleteExpired deletes records whose transaction ended longer ago than age, by the database's clock: at most limit of
// them, the oldest first. It never deletes outputs that were not published, nor records without a seal. It waits for no
// claim, and no claim waits for it longer than it runs; on SQLite, where all writes wait for each other, keep limit small.
// It returns how many it deleted, also with an error.
//
// On PostgreSQL it begins where the former call ended, as long as there is enough to delete, and looks at older records
// afterwards.
func (s *Store) DeleteExpired(ctx context.Context, age time.Duration, limit int) (int, error) {
	if err := dialect.CheckExpired(age, limit); err != nil {
		return 0, err
	}
	deleted, err := s.database.deleteExpired(ctx, s, age.Microseconds(), limit)
	if err != nil {
		return deleted, s.wrap(ctx, "delete expired records", err)
	}
	return deleted, nil
}

// OldestAge returns how long ago the oldest record that is not kept for its outputs was received, and false if there is
// none. Far beyond the retention, it says that the cleanup does not keep up.
func (s *Store) OldestAge(ctx context.Context) (time.Duration, bool, error) {
	var age int64
	err := s.db.QueryRowContext(ctx, s.statements.OldestAge).Scan(&age)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, s.wrap(ctx, "find oldest record", err)
	}
	return time.Duration(age) * time.Microsecond, true, nil
}

func queryKeys(ctx context.Context, tx *sql.Tx, query string, args ...any) ([]inbox.Key, error) {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var keys []inbox.Key
	for rows.Next() {
		var key inbox.Key
		if err := rows.Scan(&key.Consumer, &key.MessageID); err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, rows.Err()
}
