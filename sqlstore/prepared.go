package sqlstore

import (
	"context"
	"database/sql"
	"sync"
)

// preparedStatements are a store's prepared statements. They are prepared on the database, which prepares them again on
// each further connection that they are used on.
type preparedStatements struct {
	db *sql.DB

	mu         sync.RWMutex
	statements map[string]*sql.Stmt
}

func newPreparedStatements(db *sql.DB) *preparedStatements {
	return &preparedStatements{db: db, statements: make(map[string]*sql.Stmt)}
}

// prepare prepares what is not prepared yet. That takes a connection of the pool, so it has to happen before a transaction
// holds one: the pool may have no other.
func (p *preparedStatements) prepare(ctx context.Context, queries ...string) error {
	for _, query := range queries {
		if p.get(query) != nil {
			continue
		}
		// Outside of the lock, which knows no context.
		stmt, err := p.db.PrepareContext(ctx, query) //nolint:sqlclosecheck // kept
		if err != nil {
			return err
		}
		p.mu.Lock()
		if p.statements[query] == nil {
			p.statements[query], stmt = stmt, nil
		}
		p.mu.Unlock()
		if stmt != nil {
			_ = stmt.Close() // another delivery was faster
		}
	}
	return nil
}

// get returns the prepared query, or nil.
func (p *preparedStatements) get(query string) *sql.Stmt {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.statements[query]
}

// forget drops all statements, after the server did not know one of them any more.
func (p *preparedStatements) forget() {
	p.mu.Lock()
	stale := p.statements
	p.statements = make(map[string]*sql.Stmt)
	p.mu.Unlock()
	for _, stmt := range stale {
		_ = stmt.Close()
	}
}
