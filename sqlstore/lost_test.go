package sqlstore_test

import (
	"testing"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

func TestTransactionTellsThatItsConnectionWasLost(t *testing.T) {
	t.Parallel()
	forEach(t, []target{pgxStdlib, pgxSimple, libPQ, mariaDB}, func(t *testing.T, target target) {
		store, _, _ := newStore(t, target)
		for _, kill := range []bool{false, true} {
			tx, native := begin(t, store, "m")
			statement := "SELECT nothing"
			if kill {
				statement = "SELECT pg_terminate_backend(pg_backend_pid())"
				if target.dialect == sqlstore.MySQL {
					statement = "KILL CONNECTION_ID()"
				}
			}
			if _, err := native.ExecContext(t.Context(), statement); err == nil && target.dialect != sqlstore.MySQL {
				t.Fatal("no error")
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
			if got := tx.(inbox.LossDetector).ConnectionLost(); got != kill {
				t.Errorf("killed %t: lost %t", kill, got)
			}
			wantUnclaimed(t, store, "m")
		}
	})
}
