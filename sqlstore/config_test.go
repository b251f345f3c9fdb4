package sqlstore_test

import (
	"database/sql"
	"strings"
	"testing"

	"github.com/watermill-inbox/inbox/sqlstore"
)

func TestConfigFaultsNameTheirField(t *testing.T) {
	t.Parallel()

	db := sqliteOne.open(t)
	for name, test := range map[string]struct {
		config sqlstore.Config
		want   []string
	}{
		"ZeroValue":   {sqlstore.Config{}, []string{"Config.Dialect"}},
		"Dialect":     {sqlstore.Config{Dialect: 4}, []string{"Config.Dialect", "Dialect(4)"}},
		"Table":       {sqlstore.Config{Dialect: sqlstore.SQLite, Table: `inbox"; --`}, []string{"Config.Table"}},
		"ReadOnly":    {sqlstore.Config{Dialect: sqlstore.SQLite, TxOptions: sql.TxOptions{ReadOnly: true}}, []string{"Config.TxOptions"}},
		"SeveralOnes": {sqlstore.Config{Dialect: -1, Table: "a.b.c"}, []string{"Config.Dialect", "Config.Table"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			store, err := sqlstore.New(db, test.config)
			wantError(t, err, nil, test.want...)
			if store != nil {
				t.Error("there is a store beside the error")
			}
			wantError(t, test.config.Validate(), nil, test.want...)
		})
	}

	for _, dialect := range []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.MySQL, sqlstore.SQLite} {
		if err := (sqlstore.Config{Dialect: dialect}).Validate(); err != nil {
			t.Errorf("%s: %v", dialect, err)
		}
		if strings.Contains(dialect.String(), "Dialect") {
			t.Errorf("dialect %d has no name", dialect)
		}
	}
}

func TestNewNeedsADatabaseAndOpensNoConnection(t *testing.T) {
	t.Parallel()

	_, err := sqlstore.New(nil, sqlstore.Config{Dialect: sqlstore.SQLite})
	wantError(t, err, nil, "database is nil")

	db := open(t, "pgx", "postgres://nobody@192.0.2.1/nothing")
	if _, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.PostgreSQL}); err != nil {
		t.Fatal(err)
	}
	if opened := db.Stats().OpenConnections; opened != 0 {
		t.Errorf("New opened %d connections", opened)
	}
}
