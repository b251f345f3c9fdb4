package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

const week = int64(7 * 24 * time.Hour / time.Microsecond)

// fillExpired inserts rows that are long expired, the oldest 5,000 of which wait for their outputs to be published.
func fillExpired(t *testing.T, target target, db *sql.DB, table string) {
	t.Helper()
	switch target.name {
	case pgxStdlib.name:
		mustExec(t, db, `
INSERT INTO `+table+` (consumer, message_id, received_at, processed_at, outputs)
SELECT 'orders', md5(i::text), now() - interval '60 days' + i * interval '1 second', now() - interval '60 days' + i * interval '1 second',
	CASE WHEN i <= 5000 THEN ''::bytea END
FROM generate_series(1, 20000) AS i`)
		mustExec(t, db, "ANALYZE "+table)
	case mariaDB.name:
		mustExec(t, db, `
INSERT INTO `+table+` (consumer, message_id, received_at, processed_at, outputs, outputs_pending)
SELECT 'orders', MD5(seq), UTC_TIMESTAMP(6) - INTERVAL 60 DAY + INTERVAL seq SECOND, UTC_TIMESTAMP(6) - INTERVAL 60 DAY + INTERVAL seq SECOND,
	IF(seq <= 5000, '', NULL), seq <= 5000
FROM seq_1_to_20000`)
		mustExec(t, db, "ANALYZE TABLE "+table)
	default:
		mustExec(t, db, `
WITH RECURSIVE s (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < 20000)
INSERT INTO `+table+` (consumer, message_id, received_at, processed_at, outputs)
SELECT 'orders', hex(randomblob(16)), strftime('%Y-%m-%d %H:%M:%f', 'now', '-60 days', i || ' seconds'),
	strftime('%Y-%m-%d %H:%M:%f', 'now', '-60 days', i || ' seconds'), CASE WHEN i <= 5000 THEN x'' END
FROM s`)
	}
}

// TestDeleteExpiredReadsNoMoreThanItDeletes looks at what the database does: the rows come in the order of the index, and
// those that wait for their outputs are not among them.
func TestDeleteExpiredReadsNoMoreThanItDeletes(t *testing.T) {
	t.Parallel()
	for target, check := range map[*target]func(t *testing.T, conn *sql.Conn, table dialect.Table){
		&pgxStdlib: func(t *testing.T, conn *sql.Conn, table dialect.Table) {
			t.Helper()
			plan := queryText(t, conn, "EXPLAIN (ANALYZE, COSTS OFF) "+dialect.PostgreSQL(table).DeleteExpired, week, 1000, 0)
			wantPlan(t, plan, []string{"Index Scan using " + table.Name + "_received_at_idx", "rows=1000 "},
				[]string{"Seq Scan", "Sort", "Rows Removed"})
		},
		&mariaDB: func(t *testing.T, conn *sql.Conn, table dialect.Table) {
			t.Helper()
			if _, err := conn.ExecContext(t.Context(), "FLUSH STATUS"); err != nil {
				t.Fatal(err)
			}
			rows := strings.Count(queryText(t, conn, dialect.MySQL(table).SelectExpired, week, week, 1000), "\n")
			if rows != 1000 {
				t.Errorf("%d rows", rows)
			}
			var name string
			for _, read := range []struct {
				counter string
				atMost  int
			}{{"Handler_read_next", 1000}, {"Handler_read_prev", 0}, {"Handler_read_rnd", 0}, {"Sort_rows", 0}} {
				var n int
				err := conn.QueryRowContext(t.Context(), "SHOW SESSION STATUS LIKE '"+read.counter+"'").Scan(&name, &n)
				if err != nil || n > read.atMost {
					t.Errorf("%s is %d, want at most %d (%v)", read.counter, n, read.atMost, err)
				}
			}
		},
		&sqliteOne: func(t *testing.T, conn *sql.Conn, table dialect.Table) {
			t.Helper()
			plan := queryText(t, conn, "EXPLAIN QUERY PLAN "+dialect.SQLite(table).DeleteExpired, week, 1000)
			wantPlan(t, plan, []string{"INDEX " + table.Name + "_received_at_idx (received_at<?)"}, []string{"TEMP B-TREE", "SCAN " + table.Name})
		},
	} {
		t.Run(target.name, func(t *testing.T) {
			t.Parallel()
			store, db, name := newStore(t, *target)
			fillExpired(t, *target, db, name)
			table, err := dialect.ParseTable(name)
			if err != nil {
				t.Fatal(err)
			}
			conn, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			check(t, conn, table)
			if err := conn.Close(); err != nil {
				t.Fatal(err)
			}
			for {
				deleted, err := store.DeleteExpired(t.Context(), 7*24*time.Hour, 1000)
				if err != nil {
					t.Fatal(err)
				}
				if deleted == 0 {
					break
				}
			}
			wantCount(t, db, name, 5000)
		})
	}
}

// queryText returns the last column of every row, a line each.
func queryText(t *testing.T, conn interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}, query string, args ...any,
) string {
	t.Helper()
	rows, err := conn.QueryContext(t.Context(), query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for rows.Next() {
		values := make([]any, len(columns))
		for i := range values {
			values[i] = new(any)
		}
		last := new(string)
		values[len(values)-1] = last
		if err := rows.Scan(values...); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&text, *last)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

func wantPlan(t *testing.T, plan string, want, not []string) {
	t.Helper()
	for _, text := range want {
		if !strings.Contains(plan, text) {
			t.Errorf("%q is not in the plan:\n%s", text, plan)
		}
	}
	for _, text := range not {
		if strings.Contains(plan, text) {
			t.Errorf("%q is in the plan:\n%s", text, plan)
		}
	}
}
